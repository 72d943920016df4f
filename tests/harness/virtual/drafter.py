"""A real draft worker in virtual time, which drafts known texts with a profile's acceptance."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.protocol.messages import Message
from tests.harness.virtual.world import World
from tests.system.links import Idle, Listening
from tools.simulation.pace import Pace
from tools.simulation.profile import Profile
from tools.simulation.replay import PacedDrafter, ReplayDrafter, Script

VOCAB = 4096
Texts = Collection[tuple[int, ...]]
Answer = Callable[[str, Message], None]


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of a drafter. Drafters with the same `seed` err at the same positions. `hop`: seconds one way."""

    profile: Profile
    hop: float = 0.0
    fan_out: str = "best-first"
    seed: int = 0


class VirtualDrafter(Listening):
    """A draft worker `way` seconds from the orchestrator, with its own latency.

    It reads messages only between two forwards, and its messages leave when a forward ends. A worker that is `gone`
    receives and sends nothing.
    """

    def __init__(self, name: str, world: World, machine: Machine, texts: Texts, answer: Answer) -> None:
        self.name, self.model, self.inbox = name, machine.seed, deque[Message]()
        self.way = machine.profile.link_ms / 1000 + machine.hop
        self.gone = False
        self._world, self._answer = world, answer
        self._scheduled = False
        profile = machine.profile
        script = Script(texts, profile.acceptance, profile.bonus_ranks, VOCAB, seed=machine.seed)
        pace = Pace(profile.draft, self._nap, world.clock)
        drafter = PacedDrafter(ReplayDrafter(script), profile.name, pace, world.clock)
        self._worker = DraftWorker(self, drafter, FAN_OUT_POLICIES[machine.fan_out])

    def deliver(self, message: Message) -> None:
        """Delivers a message that is sent now after its latency."""
        self._world.after(self.way, lambda: self._arrived(message))

    def send(self, message: Message) -> None:
        self._world.after(self.way, lambda: self._answer_now(message))

    def _answer_now(self, message: Message) -> None:
        if not self.gone:
            self._answer(self.name, message)

    def _arrived(self, message: Message) -> None:
        self.inbox.append(message)
        self._wake(0.0)

    def _wake(self, seconds: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._world.after(seconds, self._turn)

    def _turn(self) -> None:
        self._scheduled, began = False, self._world.now
        if self.gone:
            return
        with suppress(Idle):
            self._worker.turn()
            self._wake(0.0)
        self._world.now = began

    def _nap(self, seconds: float) -> None:
        self._world.now += seconds
