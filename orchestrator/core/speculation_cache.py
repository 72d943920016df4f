"""The speculation cache of one request: outcome -> branch, one round deep (paper definition 4).

An outcome (k, t) is identified by the tokens that it makes final: the first k of the chain, then t. The cache holds
only branches that arrived before the outcome was handled, so a hit is a prediction, never a look at the answer. Several
drafters fill one cache: of two branches for the same outcome the deeper one counts.

`CacheBudget` limits the bytes of the branches of each request and of all. Branches over it are dropped and counted. An
honest drafter's branches take kilobytes; the limits are for one that sends as much as a frame holds.

`NgramIndex` finds copies, for misses and for longer chains: the tokens that followed the last time the text ended like
this (prompt lookup). It needs no worker, so the loss of one does not affect it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from outrider.orchestrator.core.policy.estimates import Copy
from outrider.protocol.messages import Alternatives, Branches
from outrider.protocol.trees import SparseQ

A_REQUEST, IN_ALL = 16 << 20, 64 << 20
"""The budget of one request and of all, in bytes."""


@dataclass(slots=True)
class CacheBudget:
    """The bytes held, and the number of messages dropped."""

    held: int = 0
    dropped: int = 0

    def reserve(self, size: int, of_request: int) -> bool:
        """Reserves `size` bytes for a request that holds `of_request`; returns False if they exceed the budget."""
        if of_request + size > A_REQUEST or self.held + size > IN_ALL:
            self.dropped += 1
            return False
        self.held += size
        return True

    def release(self, size: int) -> None:
        self.held -= size


_TOKEN_BYTES = 40  # a number and its place in a tuple


@dataclass(frozen=True, slots=True)
class CachedBranch:
    """A branch: its chain, the distributions it was drawn from (if it was), its drafter, and its alternatives."""

    chain: tuple[int, ...]
    q: SparseQ | None = None
    drafter: str = ""
    alternatives: Alternatives | None = None


class SpeculationCache:
    """The branches of the round under verification; `start` empties it for the next one.

    The `lead` is the drafter with the likeliest outcomes; `pushes` counts its own.
    """

    def __init__(self, budget: CacheBudget | None = None) -> None:
        """`budget` is shared with other requests' caches."""
        self._budget = budget or CacheBudget()
        self._held = 0
        self._branches: dict[tuple[int, ...], CachedBranch] = {}
        self._awaited: dict[str, int] = {}
        self._requested = 0
        self.lead = ""
        self.pushes = 0

    def start(self, asked: dict[str, int] | None = None) -> None:
        """Empties the cache; `asked` is the number of outcomes that each drafter prepares, the lead first."""
        self.clear()
        self._awaited = asked or {}
        self._requested = sum(self._awaited.values())
        self.lead = next(iter(self._awaited), self.lead)
        self.pushes = 0

    def clear(self) -> None:
        """Drops all branches and releases their bytes."""
        self._branches.clear()
        self._budget.release(self._held)
        self._held = 0

    @property
    def final(self) -> bool:
        """Whether all drafters have finished, so that no branch will come."""
        return not self._awaited

    @property
    def covered(self) -> int:
        """The number of outcomes whose drafters have finished; 0 if the lead has not."""
        return 0 if self.lead in self._awaited else self._requested - sum(self._awaited.values())

    def add(self, message: Branches, drafter: str) -> None:
        """Adds branches if there is room; a deeper one replaces a shorter one. Depth decides, never the tokens."""
        end = 0
        self.pushes += drafter == self.lead
        for entry in message.entries if self._has_room(message) else ():
            start, end = end, end + len(entry.chain)
            old = self._branches.get(entry.committed)
            if old is None or len(entry.chain) > len(old.chain) or (entry.alternatives and old.chain == entry.chain):
                q = message.q.part(start, end) if message.q is not None else None
                self._branches[entry.committed] = CachedBranch(entry.chain, q, drafter, entry.alternatives)
        if message.final:
            self.finished(drafter)

    def _has_room(self, message: Branches) -> bool:
        """Reserves the bytes of a whole message, because its arrays are views of one buffer."""
        size = _TOKEN_BYTES * sum(len(entry.committed) + len(entry.chain) for entry in message.entries)
        size += message.q.nbytes if message.q is not None else 0
        if not self._budget.reserve(size, self._held):
            return False
        self._held += size
        return True

    def finished(self, drafter: str) -> None:
        """Records that a drafter has sent all its branches."""
        self._awaited.pop(drafter, None)

    def lost(self, drafter: str) -> None:
        """Records that a drafter will not send the rest of its branches."""
        self._requested -= self._awaited.pop(drafter, 0)

    def lookup(self, committed: tuple[int, ...]) -> CachedBranch | None:
        """Returns the branch for the outcome that makes these tokens final, as deep as it is, or None.

        If an alternative and further tokens of its branch were accepted, it is the rest of that branch.
        """
        branch = self._branches.get(committed)
        for length in range(len(committed) - 1, 0, -1) if branch is None else ():
            shorter, rest = self._branches.get(committed[:length]), committed[length:]
            if shorter is not None and shorter.chain[: len(rest)] == rest and len(shorter.chain) > len(rest):
                return CachedBranch(shorter.chain[len(rest) :], None, shorter.drafter)
        return branch

    def grows(self, branch: CachedBranch) -> bool:
        """Whether its drafter may still extend it."""
        return branch.drafter in self._awaited

    def complete(self, depth: int) -> Iterable[tuple[tuple[int, ...], CachedBranch]]:
        """Returns (outcome, branch) for each branch that has its full depth or will not grow."""
        branches = self._branches.items()
        if self.final:
            return branches
        return [(commit, branch) for commit, branch in branches if not self.grows(branch) or len(branch.chain) >= depth]

    def pushes_until(self, accepted: int, chain_length: int) -> int:
        """Returns how many more pushes of the lead may bring the first branches of `accepted` tokens; 0: they are here.

        The branches of full acceptance come with the second push: the first one feeds the chain's last token.
        """
        leads = (commit for commit, branch in self._branches.items() if branch.drafter == self.lead)
        if self.lead not in self._awaited or any(len(commit) == accepted + 1 for commit in leads):
            return 0
        return max((2 if accepted == chain_length else 1) - self.pushes, 0)

    def __len__(self) -> int:
        return len(self._branches)


LONGEST = 5
SHORTEST = 2
# The core indexes PIECE tokens at a time, well under a millisecond, and keeps the last WINDOW, some 15 MiB.
PIECE = 256
WINDOW = 1 << 15


class NgramIndex:
    """The n-grams of the last `WINDOW` tokens of one request's text, with the position after their last occurrence.

    Tokens are appended at once and indexed when there is time; until then a lookup does not find them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._read = 0
        self.extend(tokens)
        self.read_on(len(self._tokens))

    @property
    def is_empty(self) -> bool:
        """Whether it has no tokens."""
        return not self._tokens

    @property
    def is_behind(self) -> bool:
        """Whether there are tokens to index."""
        return self._read < len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, and indexes them unless earlier ones are still to be indexed."""
        behind = self.is_behind
        self._tokens += tokens
        if not behind:
            self.read_on(PIECE)

    def read_on(self, count: int) -> None:
        """Indexes up to `count` more tokens."""
        if not self._read:
            self._read = max(len(self._tokens) - WINDOW, 0)
        for end in range(self._read, min(self._read + count, len(self._tokens))):
            self._forget(end - WINDOW)
            for gram in self._ending_at(end):
                self._followed_at[gram] = end
            self._read = end + 1

    def _ending_at(self, end: int) -> Iterator[tuple[int, ...]]:
        """Returns the n-grams before the token at `end`."""
        return (tuple(self._tokens[end - n : end]) for n in range(SHORTEST, min(LONGEST, end) + 1))

    def _forget(self, end: int) -> None:
        """Drops the n-grams whose last occurrence is before the token at `end`."""
        for gram in self._ending_at(end):
            if self._followed_at.get(gram) == end:
                del self._followed_at[gram]

    def lookup(self, length: int, then: Sequence[int] = ()) -> Copy:
        """Returns `length` tokens that followed the longest known suffix of the text, extended by `then`.

        A copy may continue with its own beginning: a text that repeats itself continues to repeat.
        """
        tail = [*self._tokens[-LONGEST:], *then][-LONGEST:]
        for n in range(len(tail), SHORTEST - 1, -1):
            at = self._followed_at.get(tuple(tail[-n:]))
            if at is not None:
                return Copy(self._copied(at, max(length, 0), then), n)
        return Copy()

    def _copied(self, at: int, length: int, then: Sequence[int]) -> tuple[int, ...]:
        copied = self._tokens[at : at + length]
        if len(copied) < length:
            copied += then
        for index in range(length - len(copied)):
            copied.append(copied[index])
        return tuple(copied[:length])
