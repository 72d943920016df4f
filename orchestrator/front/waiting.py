"""Requests that wait: their tickets, and who is next.

`FairQueue`: who is next: requests wait in one line per client, and the clients take turns; so do those for whom a
client asks. Knows order only; knows nothing of what waits.

`Ticket`: a request as the front keeps it, and its lines in the log.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from outrider.orchestrator.front.admission import Accepted
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS

T = TypeVar("T")
Whose: TypeAlias = tuple[bytes, ...]
"""Whose a request is: a client, or a client and somebody who has a part in its turns, and so on."""


class FairQueue(Generic[T]):
    """A client with a hundred requests does not keep one with a single request waiting."""

    def __init__(self) -> None:
        self._own: deque[T] = deque()
        self._lines: OrderedDict[bytes, FairQueue[T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._own) + sum(map(len, list(self._lines.values())))  # any thread may ask

    def put(self, whose: Whose, item: T, first: bool = False) -> None:
        """At the end of its own line; `first`: before all, for somebody waits in the middle of something."""
        if not whose:
            self._own.appendleft(item) if first else self._own.append(item)
            return
        self._lines.setdefault(whose[0], FairQueue()).put(whose[1:], item, first)
        if first:
            self._lines.move_to_end(whose[0], last=False)

    def first(self) -> T | None:
        """Whose turn it is, left in the line; None when nobody waits."""
        return self._own[0] if self._own else next((line.first() for line in self._lines.values()), None)

    def take(self) -> T | None:
        """The first of those whose turn it is, who then go to the back; None when nobody waits."""
        if self._own:
            return self._own.popleft()
        if not self._lines:
            return None
        name, line = self._lines.popitem(last=False)
        item = line.take()
        if len(line):
            self._lines[name] = line
        return item

    def drop(self, whose: Whose, item: T) -> bool:
        """Takes `item` out of its line; False when it is not in it."""
        if not whose:
            found = item in self._own
            if found:
                self._own.remove(item)
            return found
        line = self._lines.get(whose[0])
        if line is None or not line.drop(whose[1:], item):
            return False
        if not len(line):
            del self._lines[whose[0]]
        return True


log = logging.getLogger(__name__)


@dataclass(slots=True)
class Ticket:
    """A request from the client's word to its end. `whose` turns it waits for. `ending`: stop or cancelled once the
    reader wants no more. `begun_ns`: when it was its turn; 0: it waits."""

    sender: bytes
    name: str
    accepted: Accepted
    whose: Whose
    tokens: int = 0
    ending: str = ""
    asked_ns: int = field(default_factory=clock.now)
    begun_ns: int = 0

    @property
    def queue_ms(self) -> float:
        """How long it has waited for its turn."""
        return ((self.begun_ns or clock.now()) - self.asked_ns) / MILLISECOND_NS

    @property
    def key(self) -> str:
        return self.accepted.admit.request


def note(ticket: Ticket, level: int, told: str, *values: object) -> None:
    """A line about a request: what it is called here, and by its client."""
    about = {"request": ticket.key, "client_request": ticket.name}
    log.log(level, f"%s (%s) {told}", ticket.key, ticket.name, *values, extra=about)
