"""An engine in virtual time: the real scheduler, planner, speculation cache and draft workers, and a simulated target.

Nothing sleeps: forwards and messages take the times of a latency profile on a virtual clock, so a minute of a simulated
machine takes seconds, and a run repeats exactly. The overhead of real processes (sockets, scheduling, Python) is
omitted, except for `hop_ms`, the one-way latency of every message. There is no queue, and tokens are not decoded.
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
from tests.harness.virtual.event_loop import EventLoop
from tests.harness.virtual.prompt_cache import VirtualPromptCache
from tests.harness.virtual.target import VirtualTarget
from tools.simulation.profile import Profile

if TYPE_CHECKING:
    from outrider.orchestrator.core.worker_pool import WorkerPool

TARGET = "target-0"


@dataclass(frozen=True, slots=True)
class Hardware:
    """The hardware of an engine. `others`: additional drafters. `prompt_ms`: the time to read a prompt token.
    `cache_tokens`: the size of the prompt cache."""

    profile: Profile
    hop_ms: float = 0.0
    fan_out: str = "best-first"
    others: tuple[Machine, ...] = ()
    prompt_ms: float = 0.0
    cache_tokens: int = 0

    @property
    def drafters(self) -> tuple[Machine, ...]:
        return (Machine(self.profile, self.hop_ms / 1000, self.fan_out), *self.others)


class VirtualEngine:
    """The real scheduler (`rounds`) with simulated workers on `loop`; `on_event` gets the events for the front."""

    target_context = 1 << 20
    target_abilities = Abilities()

    def __init__(
        self,
        loop: EventLoop,
        hardware: Hardware,
        settings: ServeSettings,
        on_event: Callable[[ToFront], None],
        texts: Sequence[tuple[int, ...]] = (),
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
    ) -> None:
        """`texts`: texts that drafters know in addition to those of the running requests."""
        self.loop = loop
        self.stopped = False
        self._hardware = hardware
        self._hop_s = hardware.hop_ms / 1000
        self._texts = {f"known {number}": text for number, text in enumerate(texts)}
        self.target = VirtualTarget(
            loop,
            hardware.profile,
            self._hop_s,
            lambda message: self._handle(TARGET, message),
            hardware.prompt_ms,
            VirtualPromptCache(hardware.cache_tokens),
        )
        self._drafters = {name: self._start_drafter(name) for name in self._names()}
        self.rounds = Scheduler(cast("WorkerPool", self), settings, on_event, Trace(None), tunings, memory)

    # --- the worker pool's interface for the scheduler ------------------------------------------------------------

    def notes(self) -> list[str]:
        return []

    def hello(self, name: str) -> Hello:
        """Returns the description of a worker. Drafters with the same model have the same number of parameters."""
        parameters = self._drafters[name].model if name in self._drafters else 0
        return Hello("draft", name, 0, "", "", 1 << 20, 0, parameters, 0, incarnation=0)

    def drafters(self) -> set[str]:
        return set(self._drafters)

    def prefill_workers(self) -> set[str]:
        """Returns no prefill workers."""
        return set()

    def record_invalid(self, name: str, kind: str) -> None:
        raise WorkerError(f"a valid message of {name} was counted as invalid: {kind}")

    def send_target(self, message: Message) -> None:
        text = self._texts.get(getattr(message, "request", ""), ())
        self.loop.call_later(self._hop_s, lambda: self.target.receive(text, message))

    def send_worker(self, name: str, message: Message) -> None:
        if name in self._drafters:
            self._drafters[name].deliver(message)

    def flush_and_yield(self) -> None:
        """Does nothing: messages are sent when they are queued."""

    # --- the front's interface ------------------------------------------------------------------------------------

    def begin(self, admit: Admit, text: tuple[int, ...]) -> None:
        """Begins a request. `text`: its prompt and its answer."""
        self._texts[admit.request] = text
        self.rounds.begin(admit, self.loop.now_ns())
        self._schedule_tick()

    def forget(self, request: str) -> None:
        """Removes a request that has ended."""
        del self._texts[request]

    # --- losses ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Stops all workers at once."""
        self.stopped = True
        self.target.end()
        for drafter in self._drafters.values():
            drafter.stopped = True

    def lose_drafters(self, count: int, after_s: float) -> None:
        """Stops the last `count` drafters. The scheduler is told after `after_s` seconds."""
        lost = [self._drafters[name] for name in self._names()[-count:] if name in self._drafters] if count else []
        for drafter in lost:
            drafter.stopped = True
        self.loop.call_later(after_s, lambda: self._remove_drafters(lost))

    def regain_drafters(self) -> None:
        """Replaces the lost drafters by new ones."""
        for name in self._names():
            if name not in self._drafters and not self.stopped:
                self._drafters[name] = self._start_drafter(name)
                self.rounds.on_drafter_ready(name)

    def _remove_drafters(self, lost: Sequence[VirtualDrafter]) -> None:
        if self.stopped:
            return
        for drafter in lost:
            del self._drafters[drafter.name]
            self.rounds.on_drafter_lost(drafter.name, f"{drafter.name} was lost", self.loop.now_ns())
        self._schedule_tick()

    def _names(self) -> list[str]:
        return [f"draft-{number}" for number in range(len(self._hardware.drafters))]

    def _start_drafter(self, name: str) -> VirtualDrafter:
        machine = self._hardware.drafters[self._names().index(name)]
        return VirtualDrafter(name, self.loop, machine, self._texts.values(), self._handle)

    def _handle(self, sender: str, message: Message) -> None:
        if not self.stopped:
            self.rounds.handle([(sender, message)], self.loop.now_ns())
            self._schedule_tick()

    def _schedule_tick(self) -> None:
        deadline_ns = self.rounds.next_deadline_ns()
        if deadline_ns is not None:
            left = max(deadline_ns / 1e9 - self.loop.now, 0.0) + 1e-9
            self.loop.call_later(left, self._on_deadline, last=True)

    def _on_deadline(self) -> None:
        if not self.stopped:
            self.rounds.on_tick(self.loop.now_ns())
