"""Plain steps of one slot, each begun before the one before it is read, as the target worker makes them."""

from __future__ import annotations

from outrider.engine.kv_cache import CacheSlot
from outrider.engine.verify import VerifyInput, VerifyOutput, begin_forward
from outrider.protocol.errors import OutriderError


def run_ahead(slot: CacheSlot, steps: int) -> list[int]:
    """The tokens of so many steps; none is begun that nobody reads."""
    under_way, tokens = begin_forward([VerifyInput(slot)]), []
    for left in range(steps - 1, -1, -1):
        following = (
            begin_forward([VerifyInput(slot)], after=under_way) if left and slot.sequence.has_free_marks else None
        )
        (output,) = under_way.commit()
        tokens.append(said(output).bonus)
        if left:
            under_way = following or begin_forward([VerifyInput(slot)])
    return tokens


def said(output: VerifyOutput | OutriderError) -> VerifyOutput:
    if isinstance(output, OutriderError):
        raise output
    return output
