"""The speculation cache of one request: outcome -> branch, one round deep (paper definition 4).

An outcome (k, t) is identified by the tokens that it makes final: the first k of the chain, then t. The cache holds
only branches that arrived before the outcome was handled, so a hit is a prediction, never a look at the answer. Several
drafters fill one cache: of two branches for the same outcome the deeper one counts.

`CacheBudget` limits the bytes of the branches of each request and of all. Branches over it are dropped and counted. An
honest drafter's branches take kilobytes; the limits are for one that sends as much as a frame holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
        if self.lead not in self._awaited or any(len(commit) == accepted + 1 for commit in self._leads()):
            return 0
        return max((2 if accepted == chain_length else 1) - self.pushes, 0)

    def _leads(self) -> Iterable[tuple[int, ...]]:
        """Returns the outcomes that the lead has prepared."""
        return (committed for committed, branch in self._branches.items() if branch.drafter == self.lead)

    def __len__(self) -> int:
        return len(self._branches)
