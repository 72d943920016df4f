"""The speculation cache of one request: outcome -> branch, one round deep (paper definition 4).

An outcome (k, t) is identified by the tokens that it makes final: the first k of the chain, then t. The cache holds
only what arrived before the outcome was handled, so a hit is a prediction, never a look at the answer. Several drafters
fill one cache: where two have prepared the same outcome, the deeper branch counts.

`CacheBudget`: how many bytes the branches of all requests may take, and those of each. What exceeds it is dropped and
counted. An honest drafter's branches take kilobytes; the bounds are for one that sends as much as a frame holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.protocol.messages import Alternatives, Branches
from outrider.protocol.trees import SparseQ

A_REQUEST, IN_ALL = 16 << 20, 64 << 20
"""Bytes."""


@dataclass(slots=True)
class CacheBudget:
    """What is held of it, and how many messages found no place."""

    held: int = 0
    dropped: int = 0

    def reserve(self, size: int, of_request: int) -> bool:
        """Whether `size` bytes more may be held, for a request that has `of_request`; then they are."""
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
    """A branch: its chain, what that was drawn from, if it was, whose it is, and what may stand beside its tokens."""

    chain: tuple[int, ...]
    q: SparseQ | None = None
    drafter: str = ""
    alternatives: Alternatives | None = None


class SpeculationCache:
    """The branches of the round under verification; `start` empties it for the next one.

    The `lead` is the drafter with the likeliest outcomes; `pushes` counts its own.
    """

    def __init__(self, budget: CacheBudget | None = None) -> None:
        """`budget`: shared with other requests' caches."""
        self._room = budget or CacheBudget()
        self._held = 0
        self._branches: dict[tuple[int, ...], CachedBranch] = {}
        self._awaited: dict[str, int] = {}
        self._wanted = 0
        self.lead = ""
        self.pushes = 0

    def start(self, asked: dict[str, int] | None = None) -> None:
        """`asked`: of how many outcomes each drafter was asked for a branch, the lead first; default: none."""
        self.clear()
        self._awaited = asked or {}
        self._wanted = sum(self._awaited.values())
        self.lead = next(iter(self._awaited), self.lead)
        self.pushes = 0

    def clear(self) -> None:
        """Holds nothing any more."""
        self._branches.clear()
        self._room.release(self._held)
        self._held = 0

    @property
    def final(self) -> bool:
        """Nothing more will come: all drafters that were asked have finished."""
        return not self._awaited

    @property
    def covered(self) -> int:
        """Of how many outcomes the drafters have finished, the likeliest among them; else 0."""
        return 0 if self.lead in self._awaited else self._wanted - sum(self._awaited.values())

    def add(self, message: Branches, drafter: str) -> None:
        """Takes in branches as long as there is room; a deeper one replaces its shorter beginning. Depth decides, never
        what is in them."""
        end = 0
        self.pushes += drafter == self.lead
        for entry in message.entries if self._has_room(message) else ():
            start, end = end, end + len(entry.chain)
            known = self._branches.get(entry.committed)
            if (
                known is None
                or len(entry.chain) > len(known.chain)
                or (entry.alternatives and known.chain == entry.chain)
            ):
                q = message.q.part(start, end) if message.q is not None else None
                self._branches[entry.committed] = CachedBranch(entry.chain, q, drafter, entry.alternatives)
        if message.final:
            self.finished(drafter)

    def _has_room(self, message: Branches) -> bool:
        """Of a message all is held or nothing: its arrays are views of what arrived."""
        size = _TOKEN_BYTES * sum(len(entry.committed) + len(entry.chain) for entry in message.entries)
        size += message.q.nbytes if message.q is not None else 0
        if not self._room.reserve(size, self._held):
            return False
        self._held += size
        return True

    def finished(self, drafter: str) -> None:
        """Nothing more is to come of this one."""
        self._awaited.pop(drafter, None)

    def lost(self, drafter: str) -> None:
        """Nothing more is to come of this one, nor has all come."""
        self._wanted -= self._awaited.pop(drafter, 0)

    def lookup(self, committed: tuple[int, ...]) -> CachedBranch | None:
        """The branch prepared for the outcome that makes these tokens final, as deep as it has come, or None.

        Of an outcome that went beyond a token beside the chain it is the rest of that token's branch.
        """
        found = self._branches.get(committed)
        for length in range(len(committed) - 1, 0, -1) if found is None else ():
            shorter, rest = self._branches.get(committed[:length]), committed[length:]
            if shorter is not None and shorter.chain[: len(rest)] == rest and len(shorter.chain) > len(rest):
                return CachedBranch(shorter.chain[len(rest) :], None, shorter.drafter)
        return found

    def grows(self, branch: CachedBranch) -> bool:
        """Whether its drafter may still make it deeper."""
        return branch.drafter in self._awaited

    def complete(self, depth: int) -> Iterable[tuple[tuple[int, ...], CachedBranch]]:
        """Every outcome whose branch is as deep as it will be, with it."""
        known = self._branches.items()
        if self.final:
            return known
        return [(on, branch) for on, branch in known if not self.grows(branch) or len(branch.chain) >= depth]

    def pushes_until(self, accepted: int, chain_length: int) -> int:
        """How many more pushes of the lead may bring the first branches of this many accepted tokens; 0: they are here.

        The branches of full acceptance come with the second, for the chain's last token is fed with the first.
        """
        if self.lead not in self._awaited or any(len(known) == accepted + 1 for known in self._leads()):
            return 0
        return max((2 if accepted == chain_length else 1) - self.pushes, 0)

    def _leads(self) -> Iterable[tuple[int, ...]]:
        """The outcomes that the lead has prepared."""
        return (committed for committed, branch in self._branches.items() if branch.drafter == self.lead)

    def __len__(self) -> int:
        return len(self._branches)
