"""Plain decoding by the engine's forwards, pipelined as in the target worker."""

from __future__ import annotations

from outrider.engine.kv_cache import CacheSlot
from outrider.engine.verify import VerifyInput, VerifyOutput, begin_forward
from outrider.protocol.errors import OutriderError


def decode_pipelined(slot: CacheSlot, steps: int) -> list[int]:
    """Decodes `steps` tokens. Each forward is started before the output of the previous one is read.

    Every started forward is also read.
    """
    under_way, tokens = begin_forward([VerifyInput(slot)]), []
    for left in range(steps - 1, -1, -1):
        following = (
            begin_forward([VerifyInput(slot)], after=under_way) if left and slot.sequence.has_free_marks else None
        )
        (output,) = under_way.commit()
        tokens.append(unwrap(output).bonus)
        if left:
            under_way = following or begin_forward([VerifyInput(slot)])
    return tokens


def unwrap(output: VerifyOutput | OutriderError) -> VerifyOutput:
    """Returns the output, or raises it if it is an error."""
    if isinstance(output, OutriderError):
        raise output
    return output
