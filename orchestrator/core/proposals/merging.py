"""A drafter's chain, what it thought next best, and what the text says comes next, merged in one tree.

Where all of them agree there is nothing to merge, and a chain is filled as ever (`copies`). Pure functions of the
estimates; sends nothing.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.orchestrator.core.learning.acceptance import Acceptance
from outrider.orchestrator.core.learning.estimates import Estimates
from outrider.orchestrator.core.ngram import Copy, NgramIndex
from outrider.orchestrator.core.proposals.copies import LONGEST_COPY, best_tail
from outrider.orchestrator.core.proposals.proposal import Proposal
from outrider.orchestrator.core.proposals.tree import Drafts, grown
from outrider.protocol.messages import Beside
from outrider.protocol.origins import Origin
from outrider.protocol.trees import line

# Beside a chain's token hardly anything holds more often: where a row is worth that many tokens nobody is asked.
DEAREST_ROW = 0.3


def worth_telling(estimates: Estimates, takes_trees: bool) -> float:
    """How probable a token is that is worth telling beside a drafter's chain; 1: none is."""
    row = estimates.tokens_per_ms() * estimates.row_ms()
    return row if takes_trees and row < DEAREST_ROW else 1.0


def merged(
    estimates: Estimates,
    ngrams: NgramIndex,
    branch: Proposal,
    committed: tuple[int, ...],
    room: int,
    beside: Beside | None = None,
) -> Proposal | None:
    """The best tree of them; None: there is nothing to merge.

    Args:
        committed: tokens that the n-grams have not seen yet and the branch follows on.
        room: the most tokens that may hold.
        beside: what the drafter thought next best beside its chain's tokens.
    """
    chain, longest = branch.chain, min(LONGEST_COPY, room)
    instead = Copy() if ngrams.is_empty else ngrams.lookup(longest, committed)
    forks = bool(instead.chain) and chain[: len(instead.chain)] != instead.chain[: len(chain)]
    if not chain or not (forks or beside is not None):
        return None
    drafts = Drafts()
    drafts.add(chain, [estimates.drafted.rate(place) for place in range(len(chain))], branch.origin)
    if beside is not None:
        _put_beside(drafts, chain, beside)
    if forks:
        put_copy(drafts, instead, estimates.beside(instead.matched))
    after = _after(ngrams, branch, committed, longest)
    tail = best_tail(estimates, after, estimates.drafted.reach(len(chain) - 1)).tokens
    rates = [estimates.copied(after.matched).rate(place) for place in range(len(tail))]
    drafts.add((*chain, *tail), [*[0.0] * len(chain), *rates], Origin.COPIED)
    worth = None if estimates.active == 1 else estimates.tokens_per_ms()
    fixed = estimates.turnaround_ms()
    tree = grown(drafts, lambda rows: fixed + estimates.verify_ms(rows), worth)
    if not tree.parents:
        return None
    copied = tree.by.count(Origin.COPIED)
    return replace(branch, chain=tree.tokens, parents=tree.parents, by=tree.by, copied=copied)


def put_copy(drafts: Drafts, copy: Copy, holds: Acceptance) -> None:
    """What the text says comes next, whose tokens hold so well from where nobody else has said them."""
    shared = drafts.shared(copy.chain)
    drafts.add(copy.chain, [holds.rate(max(place - shared, 0)) for place in range(len(copy.chain))], Origin.COPIED)


def beside_own(estimates: Estimates, copy: Copy, drafter: str, depth: int) -> tuple[int, ...]:
    """As much of `copy` as pays beside `depth` tokens that a drafter of the target's process has yet to say.

    They are taken to be right independently of each other, and a token that both say costs one row.
    """
    own, copies, row = estimates.holding(drafter), estimates.copied(copy.matched), estimates.row_ms()
    reach, gain, best, count = 1.0, 0.0, 0.0, 0
    for place in range(len(copy.chain)):
        reach *= copies.rate(place)
        both = reach * own.reach(place) if place < depth else 0.0
        gain += reach - both - estimates.tokens_per_ms() * row * (1.0 - both)
        if gain > best:
            best, count = gain, place + 1
    return copy.chain[:count]


def unites(estimates: Estimates, drafter: str, depth: int) -> bool:
    """Whether an own drafter's tokens pay beside a branch of `depth`, with their drafting and their rows.

    As in `beside_own`; what both say costs no row.
    """
    own, ahead, worth = estimates.holding(drafter), estimates.drafted, estimates.tokens_per_ms()
    gain = -worth * estimates.own_ms(depth, drafter)
    for place in range(depth):
        both = own.reach(place) * ahead.reach(place)
        gain += own.reach(place) - both - worth * estimates.row_ms() * (1.0 - both)
    return gain > 0.0


def _after(ngrams: NgramIndex, branch: Proposal, committed: tuple[int, ...], longest: int) -> Copy:
    """What the text says comes after the branch."""
    return Copy() if ngrams.is_empty else ngrams.lookup(longest - len(branch.chain), (*committed, *branch.chain))


def _put_beside(drafts: Drafts, chain: tuple[int, ...], beside: Beside) -> None:
    """Behind what is left of the chain."""
    for token, parent, odds in zip(beside.tokens, beside.parents, beside.odds, strict=True):
        if parent < len(chain):
            above = chain[: parent + 1]
            drafts.add((*above, token), [*[0.0] * len(above), odds], Origin.GUESSED, line(len(above) + 1))
