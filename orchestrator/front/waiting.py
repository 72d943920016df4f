"""Who is next: requests wait in one line per client, and the clients take turns.

Knows order only; knows nothing of what waits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """A client with a hundred requests does not keep one with a single request waiting."""

    def __init__(self) -> None:
        self._lines: OrderedDict[bytes, deque[T]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))  # any thread may ask

    def put(self, client: bytes, item: T, first: bool = False) -> None:
        """At the end of the client's own line; `first`: before all, for somebody waits in the middle of something."""
        line = self._lines.setdefault(client, deque())
        if first:
            line.appendleft(item)
            self._lines.move_to_end(client, last=False)
        else:
            line.append(item)

    def first(self) -> T | None:
        """Whose turn it is, left in the line; None when nobody waits."""
        return next((line[0] for line in self._lines.values()), None)

    def take(self) -> T | None:
        """The first of the client whose turn it is, which then goes to the back; None when nobody waits."""
        if not self._lines:
            return None
        client, line = self._lines.popitem(last=False)
        item = line.popleft()
        if line:
            self._lines[client] = line
        return item

    def drop(self, client: bytes, item: T) -> bool:
        """Takes `item` out of the client's line; False when it is not in it."""
        line = self._lines.get(client)
        if line is None or item not in line:
            return False
        line.remove(item)
        if not line:
            del self._lines[client]
        return True
