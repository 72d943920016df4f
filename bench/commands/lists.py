"""Numbers and modes with commas between, as several flags take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from outrider.orchestrator.settings import MODES
from outrider.protocol import values
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


def modes_of(text: str) -> list[str]:
    """Each mode once, in their order.

    Raises:
        InvalidRequest: something else stands there.
    """
    return [values.word("modes", mode, MODES) for mode in dict.fromkeys(text.split(","))]
