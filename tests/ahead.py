"""Plain steps of one slot, each begun before the one before it is read, as the target worker makes them."""

from __future__ import annotations

from outrider.engine.texts import Slot
from outrider.engine.verify import Ask, Verdict, begin
from outrider.protocol.errors import OutriderError


def run_ahead(slot: Slot, steps: int) -> list[int]:
    """The tokens of so many steps; none is begun that nobody reads."""
    under_way, tokens = begin([Ask(slot)]), []
    for left in range(steps - 1, -1, -1):
        following = begin([Ask(slot)], after=under_way) if left and slot.text.marks_freely else None
        (verdict,) = under_way.verdicts()
        tokens.append(said(verdict).bonus)
        if left:
            under_way = following or begin([Ask(slot)])
    return tokens


def said(verdict: Verdict | OutriderError) -> Verdict:
    if isinstance(verdict, OutriderError):
        raise verdict
    return verdict
