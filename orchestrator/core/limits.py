"""Where a request must end: its end tokens, its length, the target's context."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.orchestrator.core.request import Request


def growth(request: Request, context: int) -> int:
    """How many tokens the request may still grow by."""
    return min(request.remaining, context - len(request.tokens))


def room(request: Request, context: int, ahead: int = 0) -> int:
    """How long a chain may be, `ahead` tokens on: the bonus must still fit the request and the target's context."""
    return min(request.remaining - 1, context - len(request.tokens)) - ahead


def up_to_end(request: Request, context: int, new: Sequence[int]) -> tuple[list[int], str | None]:
    """The tokens of `new` that count, and why the request ends with them if it does."""
    space = growth(request, context)
    for index, token in enumerate(new[:space]):
        if token in request.admit.eos:
            return list(new[: index + 1]), "eos"
    return list(new[:space]), "length" if len(new) >= space else None
