"""Times that were measured one by one, as the formula wants them (`orchestrator.core.learning.speedup`)."""

from __future__ import annotations

from collections.abc import Callable

from outrider.orchestrator.core.learning.speedup import Costs

Milliseconds = Callable[[int], float]


def costs(
    step_ms: float,
    verify_ms: Milliseconds,
    chain_ms: Milliseconds,
    ahead_ms: Milliseconds = lambda depth: 0.0,
    *,
    between_ms: float = 0.0,
    turnaround_ms: float | None = None,
) -> Costs:
    """What a round is made of.

    Args:
        step_ms: a token of plain decoding.
        verify_ms: a verify by its rows.
        chain_ms: a chain that is asked for, by its length.
        ahead_ms: the work ahead by its depth; nothing where no tree is waited for.
        between_ms: the target's wait in SD beyond the chain's time.
        turnaround_ms: its wait on a hit; None: the same. A chain that is asked for keeps SD's wait.
    """
    usual_ms = between_ms if turnaround_ms is None else turnaround_ms
    more_ms = max(between_ms - usual_ms, 0.0)
    return Costs(step_ms, verify_ms, lambda depth: chain_ms(depth) + more_ms, ahead_ms, usual_ms)
