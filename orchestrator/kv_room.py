"""How much memory texts may take in all workers together, and what one request needs of it.

A request's text lies in the target and in every drafter, so the room counts tokens alike for all: each worker's share
is what the same tokens take there. Arithmetic only; waiting is the front's matter, evicting the workers'.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.kv import KvCost
from outrider.protocol.messages import WorkerStats

_PART = 2  # of what weights leave of the machine's memory: one half is the texts', one everything else's
_ENDLESS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KvRoom:
    """`limit` bytes for texts that take `cost` in all workers together."""

    limit: int
    cost: KvCost

    @property
    def tokens(self) -> int:
        """The longest text that fits."""
        if not self.cost.per_token:
            return _ENDLESS
        return max(self.limit - self.cost.per_text, 0) // self.cost.per_token

    def places(self, tokens: int) -> int:
        """How many texts of so many tokens fit beside each other, at least one."""
        return max(self.limit // max(self.cost.of(tokens), 1), 1)

    def share(self, cost: KvCost, tokens: int) -> int:
        """The bytes of a worker where texts take `cost`; they are split as they are for a text of so many tokens."""
        return self.limit * cost.of(tokens) // max(self.cost.of(tokens), 1)


def kv_room(limit: int | None, workers: Iterable[WorkerStats], memory: int) -> KvRoom:
    """The room of these workers, those that are there or will be again.

    Args:
        limit: bytes; None: half of what their weights leave of `memory`.
        memory: the machine's, in bytes.
    """
    there = [worker for worker in workers if worker.state in ("ready", "frozen", "restarting")]
    left = max(memory - sum(worker.weight_bytes for worker in there), 0)
    return KvRoom(left // _PART if limit is None else limit, sum((worker.kv for worker in there), KvCost()))


def check_holds(room: KvRoom, context: int, name: str) -> None:
    """
    Raises:
        InvalidRequest: not even one text as long as the context of model `name` fits.
    """
    needed = room.cost.of(context)
    if needed > room.limit:
        raise InvalidRequest(
            f"kv_memory is {in_mb(room.limit)}, and one text of {context} tokens, the context of {name}, takes"
            f" {in_mb(needed)} in all workers; expected at least that, or no kv_memory for what the machine has"
        )


def in_mb(count: int) -> str:
    """Bytes for a person to read."""
    return f"{count / 1e6:.1f} MB"
