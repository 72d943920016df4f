"""Where a chain copied from the text is worth its rows: expected tokens minus the worth of the time, as in `fallback`.

Pure functions of the estimates. Copying costs nothing, so a copy may be longer than K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.ngram import Copy, NgramIndex
from outrider.orchestrator.core.proposals.proposal import Proposal, Source

LONGEST_COPY = 12


@dataclass(frozen=True, slots=True)
class Tail:
    """The first `tokens` of a copy, and what they add to a chain: tokens less the worth of their time."""

    tokens: tuple[int, ...] = ()
    gain: float = 0.0


def best_tail(estimates: Estimates, copy: Copy, held: float = 1.0) -> Tail:
    """As much of `copy` as pays behind tokens that all hold with the probability `held`."""
    best, tokens, reach = Tail(), 0.0, held
    acceptance, row = estimates.copied(copy.matched), estimates.tokens_per_ms() * estimates.row_ms()
    for index in range(len(copy.chain)):
        reach *= acceptance.rate(index)
        tokens += reach
        gain = tokens - row * (index + 1)
        if gain > best.gain:
            best = Tail(copy.chain[: index + 1], gain)
    return best


def longest_copy(ngrams: NgramIndex, room: int) -> Copy:
    """What the text says comes next; `room` is for the most tokens that a chain may have."""
    return ngrams.lookup(min(LONGEST_COPY, room))


def copied(tail: Tail) -> Proposal:
    """A chain that is nothing but copied; an empty one is an AR step."""
    source = Source.NGRAM if tail.tokens else Source.NONE
    return Proposal(tail.tokens, source, copied=len(tail.tokens))


def filled(
    estimates: Estimates, ngrams: NgramIndex, branch: Proposal, committed: tuple[int, ...], room: int
) -> Proposal:
    """A branch with what the text says after it behind it, or what the text says in its place, if that is worth more.

    Args:
        committed: tokens that the n-grams have not seen yet and the branch follows on.
        room: the most tokens the chain may have.
    """
    longest = min(LONGEST_COPY, room)
    drafted = len(branch.chain)
    after = ngrams.lookup(longest - drafted, (*committed, *branch.chain))
    instead = ngrams.lookup(longest, committed)
    held = estimates.drafted.reach(drafted - 1) if drafted else 1.0
    tail, alone = best_tail(estimates, after, held), best_tail(estimates, instead)
    brings = estimates.drafted.expected_tokens(drafted) - 1.0 + tail.gain
    costs = estimates.tokens_per_ms() * estimates.row_ms() * drafted
    if alone.tokens and alone.gain > brings - costs:
        return replace(copied(alone), lookup=branch.lookup)
    return replace(branch, chain=branch.chain + tail.tokens, copied=len(tail.tokens))
