"""The speculation cache of one request: outcome -> branch, one round deep (paper definition 4).

An outcome (k, t) is known by the tokens it makes final: the first k of the chain, then t.

Holds only what arrived before the outcome was handled, so a hit is a prediction, never a look at the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.protocol.messages import Branches, Drafted
from outrider.protocol.sparse import SparseQ


@dataclass(frozen=True, slots=True)
class Prepared:
    """A branch: its chain, and what that was drawn from, if it was."""

    chain: tuple[int, ...]
    q: SparseQ | None = None


def is_sound(message: Branches | Drafted) -> bool:
    """Whether its q, if it has one, can be what its chains were drawn from; nothing can be verified with another."""
    if message.q is None:
        return True
    chains = [message.chain] if isinstance(message, Drafted) else [entry.chain for entry in message.entries]
    return message.q.fits([token for chain in chains for token in chain])


class SpeculationCache:
    """The branches of the round under verification; `start` empties it for the next one."""

    def __init__(self) -> None:
        self._branches: dict[tuple[int, ...], Prepared] = {}
        self.pushes = 0
        self.final = False

    def start(self) -> None:
        self._branches.clear()
        self.pushes = 0
        self.final = False

    def add(self, message: Branches) -> None:
        """Takes in branches; a deeper one replaces its shorter beginning. Depth decides, never what is in them."""
        end = 0
        self.pushes += 1
        for entry in message.entries:
            start, end = end, end + len(entry.chain)
            known = self._branches.get(entry.committed)
            if known is None or len(entry.chain) > len(known.chain):
                q = message.q.part(start, end) if message.q is not None else None
                self._branches[entry.committed] = Prepared(entry.chain, q)
        self.final = self.final or message.final

    def lookup(self, committed: tuple[int, ...]) -> Prepared | None:
        """The branch prepared for the outcome that makes these tokens final, as deep as it has come, or None."""
        return self._branches.get(committed)

    def items(self) -> Iterable[tuple[tuple[int, ...], Prepared]]:
        """Every outcome with its branch."""
        return self._branches.items()

    def pushes_until(self, accepted: int, chain_length: int) -> int:
        """How many more pushes may bring the first branches of this many accepted tokens; 0 when they are here.

        The branches of full acceptance come with the second, for the chain's last token is fed with the first.
        """
        if self.final or any(len(committed) == accepted + 1 for committed in self._branches):
            return 0
        return max((2 if accepted == chain_length else 1) - self.pushes, 0)

    def __len__(self) -> int:
        return len(self._branches)
