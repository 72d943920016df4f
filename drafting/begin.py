"""Begins a request's drafting: the drafter reads its text, in the way that the request's sampling wants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from outrider.drafting.calibration import Calibration
from outrider.drafting.drafter import Drafter, DrafterFault, DrawingDrafter
from outrider.drafting.fan_out import FanOut
from outrider.drafting.work_ahead import WorkAhead
from outrider.grammar.constraint import Constraint
from outrider.protocol.sampling import SamplingParams


def begin(
    drafter: Drafter,
    tokens: Sequence[int],
    sampling: SamplingParams,
    eos: Collection[int],
    fan_out: FanOut,
    calibration: Calibration,
    *,
    cached: int = 1,
    progress: Callable[[int, int], None] | None = None,
    constraint: Constraint | None = None,
) -> WorkAhead:
    """Reads `tokens`. Continuations are drawn where residual sampling wants it and the drafter can.

    Args:
        cached: of how many continuations of a node Saguaro's factor lowers the weight.
        progress: called as (tokens done, tokens in all); may raise to end the call.
        constraint: what the text's grammar allows, so that nothing else is proposed.

    Raises:
        DrafterFault: the drafter can't have these tokens.
    """
    check_known(drafter, tokens)
    if len(tokens) >= drafter.context_length:
        raise DrafterFault(
            f"the text has {len(tokens)} tokens and the draft model's context is"
            f" {drafter.context_length}; drafting is off"
            " for this request"
        )
    if sampling.is_residual and isinstance(drafter, DrawingDrafter):
        drawing = drafter.open_drawing(tokens, sampling, cached, progress, constraint)
        return WorkAhead(drawing, eos, fan_out, calibration, drawing)
    return WorkAhead(drafter.open(tokens, sampling, progress, constraint), eos, fan_out, calibration)


def check_known(drafter: Drafter, tokens: Sequence[int]) -> None:
    """The target may have more tokens than the draft: padding, which nobody but a random model says.

    Raises:
        DrafterFault: one of these is such a token.
    """
    foreign = max(tokens, default=0)
    if foreign >= drafter.vocab_size:
        raise DrafterFault(
            f"token {foreign} is not among the draft's {drafter.vocab_size}; drafting is off from here on"
        )
