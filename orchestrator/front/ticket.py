"""A request as the front keeps it, and its lines in the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from outrider.orchestrator.front.admission import Accepted
from outrider.orchestrator.front.waiting import Whose
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS

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
