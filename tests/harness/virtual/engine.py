"""An engine in virtual time: the real rounds, planner and speculation cache, a paced target, real draft workers.

Nothing sleeps: forwards and messages take a latency profile's time on a virtual clock, so a minute of a simulated
machine takes seconds and repeats exactly. The overhead of real processes (sockets, scheduling, Python) is omitted,
except for `hop_ms`, the one-way time of any message. There is no queue and no text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import Admit, ToFront
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Abilities, Hello, Message
from tests.harness.virtual.drafter import Machine, VirtualDrafter
from tests.harness.virtual.remembered import Remembered
from tests.harness.virtual.target import PacedTarget
from tests.harness.virtual.world import World
from tools.simulation.profile import Profile

if TYPE_CHECKING:
    from outrider.orchestrator.core.worker_pool import WorkerPool

TARGET = "target-0"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of an engine. `others`: additional drafters. `prompt_ms`: the time to read a prompt token.
    `remembers`: tokens of ended texts in the prompt cache."""

    profile: Profile
    hop_ms: float = 0.0
    fan_out: str = "best-first"
    others: tuple[Machine, ...] = ()
    prompt_ms: float = 0.0
    remembers: int = 0

    @property
    def drafters(self) -> tuple[Machine, ...]:
        return (Machine(self.profile, self.hop_ms / 1000, self.fan_out), *self.others)


class VirtualEngine:
    """The real `rounds` with virtual workers in `world`; `tell` receives the events for the front."""

    target_context = 1 << 20
    target_abilities = Abilities()

    def __init__(
        self,
        world: World,
        hardware: Hardware,
        settings: ServeSettings,
        tell: Callable[[ToFront], None],
        texts: Sequence[tuple[int, ...]] = (),
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
    ) -> None:
        """`texts`: texts that drafters know in addition to the running ones."""
        self.world = world
        self.gone = False
        self._hardware = hardware
        self._hop = hardware.hop_ms / 1000
        self._texts = {f"known {number}": text for number, text in enumerate(texts)}
        self.target = PacedTarget(
            world,
            hardware.profile,
            self._hop,
            lambda message: self._handle(TARGET, message),
            hardware.prompt_ms,
            Remembered(hardware.remembers),
        )
        self._drafters = {name: self._started(name) for name in self._names()}
        self.rounds = Scheduler(cast("WorkerPool", self), settings, tell, Trace(None), tunings, memory)

    # --- the pool's interface for the rounds ----------------------------------------------------------------------

    def notes(self) -> list[str]:
        return []

    def hello(self, name: str) -> Hello:
        """Returns the description of a worker; those of the same model have as many parameters."""
        parameters = self._drafters[name].model if name in self._drafters else 0
        return Hello("draft", name, 0, 0, "", "", 1 << 20, 0, parameters, 0)

    def drafters(self) -> set[str]:
        return set(self._drafters)

    def prefill_workers(self) -> set[str]:
        """Returns no prefill workers."""
        return set()

    def record_invalid(self, name: str, kind: str) -> None:
        raise WorkerError(f"an invalid message of the honest worker {name} was reported: {kind}")

    def send_target(self, message: Message) -> None:
        text = self._texts.get(getattr(message, "request", ""), ())
        self.world.after(self._hop, lambda: self.target.receive(text, message))

    def send_worker(self, name: str, message: Message) -> None:
        if name in self._drafters:
            self._drafters[name].deliver(message)

    def flush_and_yield(self) -> None:
        """Does nothing: messages leave by the virtual clock."""

    # --- the front's part -----------------------------------------------------------------------------------------

    def begin(self, admit: Admit, text: tuple[int, ...]) -> None:
        """Begins a request; `text` is its prompt and its answer."""
        self._texts[admit.request] = text
        self.rounds.begin(admit, self.world.now_ns())
        self._watch_deadline()

    def forget(self, request: str) -> None:
        """Removes a request that has ended."""
        del self._texts[request]

    # --- losses ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Stops all workers at once."""
        self.gone = True
        self.target.end()
        for drafter in self._drafters.values():
            drafter.gone = True

    def lose_drafters(self, count: int, noticed: float) -> None:
        """Stops the last `count` drafters; the loss is noticed after `noticed` seconds."""
        lost = [self._drafters[name] for name in self._names()[-count:] if name in self._drafters] if count else []
        for drafter in lost:
            drafter.gone = True
        self.world.after(noticed, lambda: self._do_without(lost))

    def regain_drafters(self) -> None:
        """Starts new drafters in place of the lost ones."""
        for name in self._names():
            if name not in self._drafters and not self.gone:
                self._drafters[name] = self._started(name)
                self.rounds.on_drafter_ready(name)

    def _do_without(self, lost: Sequence[VirtualDrafter]) -> None:
        if self.gone:
            return
        for drafter in lost:
            del self._drafters[drafter.name]
            self.rounds.on_drafter_lost(drafter.name, f"{drafter.name} was lost", self.world.now_ns())
        self._watch_deadline()

    def _names(self) -> list[str]:
        return [f"draft-{number}" for number in range(len(self._hardware.drafters))]

    def _started(self, name: str) -> VirtualDrafter:
        machine = self._hardware.drafters[self._names().index(name)]
        return VirtualDrafter(name, self.world, machine, self._texts.values(), self._handle)

    def _handle(self, sender: str, message: Message) -> None:
        if not self.gone:
            self.rounds.handle([(sender, message)], self.world.now_ns())
            self._watch_deadline()

    def _watch_deadline(self) -> None:
        deadline_ns = self.rounds.next_deadline_ns()
        if deadline_ns is not None:
            left = max(deadline_ns / 1e9 - self.world.now, 0.0) + 1e-9
            self.world.after(left, self._on_time, last=True)

    def _on_time(self) -> None:
        if not self.gone:
            self.rounds.on_tick(self.world.now_ns())
