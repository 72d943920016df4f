"""Numbers with commas between, as several flags take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outrider.protocol.errors import InvalidRequest

N = TypeVar("N", int, float)


def numbers(name: str, text: str, kind: Callable[[str], N]) -> list[N]:
    """Each of them once, in their order.

    Raises:
        InvalidRequest: something else stands there.
    """
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise InvalidRequest(f"{name} is {text!r}; expected numbers with commas between, like 2,3,4") from None
