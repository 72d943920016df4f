"""The ways between the orchestrator's threads, as one record, and what the front may look up in the core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.orchestrator.events import ToCore, ToFront
from outrider.orchestrator.mailbox import Mailbox
from outrider.protocol.tallies import Durations


@dataclass(frozen=True, slots=True)
class End:
    """Main thread -> front thread: tell everybody and end."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Main thread -> front thread: take no new requests."""


class CoreFacts(Protocol):
    """What the core tells without being asked through a mailbox."""

    @property
    def workers_endpoint(self) -> str: ...

    @property
    def stale_messages(self) -> int: ...

    @property
    def dropped_branches(self) -> int: ...

    @property
    def rejected_frames(self) -> int: ...

    @property
    def round_seconds(self) -> Durations: ...

    @property
    def verify_seconds(self) -> Durations: ...


@dataclass(frozen=True, slots=True)
class Lines:
    """The ways between threads: to the core, from the core, and orders from the main thread."""

    core: Mailbox[ToCore]
    events: Mailbox[ToFront]
    orders: Mailbox[Drain | End]

    def close(self) -> None:
        for mailbox in (self.core, self.events, self.orders):
            mailbox.close()
