"""The real draft worker in virtual time, with a drafter that drafts known texts with a profile's acceptance rates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.protocol.messages import Message
from tests.harness.virtual.event_loop import EventLoop
from tests.system.links import FakeReceiver, Idle
from tools.simulation.pace import Pace
from tools.simulation.profile import Profile
from tools.simulation.replay import PacedDrafter, ReplayDrafter, Script

VOCAB = 4096
Texts = Collection[tuple[int, ...]]
SendMessage = Callable[[str, Message], None]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a drafter. Drafters with the same `seed` draft wrong tokens at the same positions. `hop_s`: the
    additional one-way latency of a message in seconds."""

    profile: Profile
    hop_s: float = 0.0
    fan_out: str = "best-first"
    seed: int = 0


class VirtualDrafter(FakeReceiver):
    """A draft worker whose messages take `latency_s` seconds each way.

    It reads messages only between two forwards, and its messages leave when a forward ends. A `stopped` worker
    receives and sends nothing.
    """

    def __init__(self, name: str, loop: EventLoop, machine: Machine, texts: Texts, send_message: SendMessage) -> None:
        self.name, self.model, self.inbox = name, machine.seed, deque[Message]()
        self.latency_s = machine.profile.link_ms / 1000 + machine.hop_s
        self.stopped = False
        self._loop, self._send_message = loop, send_message
        self._scheduled = False
        profile = machine.profile
        script = Script(texts, profile.acceptance, profile.bonus_ranks, VOCAB, seed=machine.seed)
        pace = Pace(profile.draft, self._advance, loop.time)
        drafter = PacedDrafter(ReplayDrafter(script), profile.name, pace, loop.time)
        self._worker = DraftWorker(self, drafter, FAN_OUT_POLICIES[machine.fan_out])

    def deliver(self, message: Message) -> None:
        """Delivers a message after the latency."""
        self._loop.call_later(self.latency_s, lambda: self._receive(message))

    def send(self, message: Message) -> None:
        self._loop.call_later(self.latency_s, lambda: self._send_now(message))

    def _send_now(self, message: Message) -> None:
        if not self.stopped:
            self._send_message(self.name, message)

    def _receive(self, message: Message) -> None:
        self.inbox.append(message)
        self._schedule_turn(0.0)

    def _schedule_turn(self, seconds: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_later(seconds, self._run_turn)

    def _run_turn(self) -> None:
        self._scheduled, began = False, self._loop.now
        if self.stopped:
            return
        with suppress(Idle):
            self._worker.turn()
            self._schedule_turn(0.0)
        self._loop.now = began

    def _advance(self, seconds: float) -> None:
        self._loop.now += seconds
