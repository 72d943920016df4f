"""Checks values from users and converts them to plain types; numpy's numbers are accepted.

Each function returns the plain value, or raises InvalidRequest with the name, the value and what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from outrider.protocol.errors import InvalidRequest

Check = Callable[[str, Any], Any]
"""(name, value) -> the converted value; raises InvalidRequest."""
MAX_REPR_LENGTH = 200
_INTEGERS = (int, np.integer)
_NUMBERS = (*_INTEGERS, float, np.floating)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE_PATTERN = re.compile(
    rf"(\d{{1,18}}(?:\.\d{{1,9}})?) ?({'|'.join(sorted(_UNITS, key=len, reverse=True))})", re.IGNORECASE
)


def check_int(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, _INTEGERS) or not low <= int(value) <= high:
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected a whole number from {low} to {high}")
    return int(value)


def check_size(name: str, value: object) -> int:
    """Checks a number of bytes, or text like 2GB, 512MB or 1.5GiB."""
    if isinstance(value, str):
        written = _SIZE_PATTERN.fullmatch(value)
        if written is None:
            raise InvalidRequest(f"{name} is {value!r}; expected a number of bytes, or a size like 2GB or 512MiB")
        value = int(float(written[1]) * _UNITS[written[2].upper()])
    return check_int(name, value, 1, 2**62)


def check_float(name: str, value: Any, low: float, high: float) -> float:
    # A large int would overflow `float`, so it is compared as it is; NaN is in no range.
    if isinstance(value, bool) or not isinstance(value, _NUMBERS) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected a number from {low:g} to {high:g}")
    return float(value)


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected True or False")
    return bool(value)


def check_choice(name: str, value: object, words: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in words:
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected one of {', '.join(words)}")
    return plain_str(value)


def check_unicode(name: str, value: object) -> str:
    """Checks text that a message can hold."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError:  # half a surrogate pair, or a byte of a command line that is not UTF-8
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected Unicode text") from None
    return plain_str(value)


def check_text(name: str, value: object) -> str:
    """Checks text, or a path, which is converted to text: what a process can be given as an argument."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected text")
    text = plain_str(str(os.fspath(value)))
    try:
        is_argument = b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        is_argument = False
    if not is_argument:
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected Unicode text without null characters")
    return text


def check_texts(name: str, value: object) -> tuple[str, ...]:
    """Checks one text or several."""
    if isinstance(value, list | tuple):
        return tuple(check_text(name, item) for item in value)
    return (check_text(name, value),)


def check_path(name: str, value: object) -> Path:
    if not isinstance(value, str | os.PathLike):
        raise InvalidRequest(f"{name} is {plain_repr(value)}; expected a path")
    return Path(check_text(name, value))


def checked_field(default: Any, check: Check, **metadata: Any) -> Any:
    """Returns a dataclass's field with a check; None is allowed if it is the default."""
    return dataclasses.field(default=default, metadata={"check": check, **metadata})


def int_field(default: int | None, low: int, high: int) -> Any:
    return checked_field(default, partial(check_int, low=low, high=high))


def float_field(default: float, low: float, high: float) -> Any:
    return checked_field(default, partial(check_float, low=low, high=high))


def check_fields(record: Any) -> None:
    """Runs the checks of a new frozen record's fields, and stores the values that they return."""
    for field in dataclasses.fields(record):
        value, check = getattr(record, field.name), field.metadata.get("check")
        if check is not None and (value is not None or field.default is not None):
            set_field(record, field.name, check(field.name, value))


def set_field(record: object, name: str, value: object) -> None:
    """Sets a field of a frozen record during its creation."""
    object.__setattr__(record, name, value)


def unknown_keyword_error(function: str, given: Iterable[str], known: Iterable[str]) -> TypeError:
    """Returns Python's error for an unknown keyword of a function, with a suggestion."""
    names = sorted(known)
    wrong = next(name for name in given if name not in names)
    close = difflib.get_close_matches(wrong, names, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return TypeError(f"{function}() got an unexpected keyword argument {wrong!r}{hint}")


def short_repr(record: Any) -> str:
    """Returns a dataclass's repr without the fields that have their defaults."""
    fields = [
        f"{field.name}={getattr(record, field.name)!r}"
        for field in dataclasses.fields(record)
        if field.repr and getattr(record, field.name) != field.default
    ]
    return f"{type(record).__name__}({', '.join(fields)})"


def plain_str(value: str) -> str:
    """Converts text of a subclass of `str`, such as numpy's or an enum's, to a plain `str`."""
    return str.__str__(value)


def plain_repr(value: object) -> str:
    """Returns the start of a value's repr for an error message; of a numpy number as a plain number."""
    try:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    except ValueError:  # Python writes no int of more than 4,300 digits
        return "too large to print"
    return text if len(text) <= MAX_REPR_LENGTH else f"{text[:MAX_REPR_LENGTH]}..."
