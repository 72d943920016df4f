"""A worker as the pool knows it, and the word that one is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.orchestrator.core.workers.far_clock import FarClock
from outrider.orchestrator.core.workers.pulse import Pulse
from outrider.orchestrator.core.workers.trust import Trust
from outrider.orchestrator.machine import memory
from outrider.orchestrator.machine.spawn import SpawnedWorker
from outrider.protocol import clock
from outrider.protocol.clock import MILLISECOND_NS, SECOND_NS
from outrider.protocol.kv import CacheUse
from outrider.protocol.messages import Hello, WorkerStats


@dataclass(slots=True)
class Worker:
    """`state` is starting, ready, refused (of no use here), frozen (silent, and may come back), restarting or lost.

    `spawned` None: it joined by itself. `hello` of one that is restarting is its predecessor's. `kv_limit`: the bytes
    for texts that it was told. `worked`: it has done something for a request, since it was let in at `entered_ns`; from
    `begun_ns` until then it loaded. `key`: what it came in with, if it had to have one; `unwelcome`: why it may stay no
    longer.
    """

    name: str
    role: str
    incarnation: int
    spawned: SpawnedWorker | None
    state: str = "starting"
    hello: Hello | None = None
    fault: str = ""
    pulse: Pulse = field(default_factory=Pulse)
    kv_limit: int = 0
    cache: CacheUse = field(default_factory=CacheUse)
    restarts: int = 0
    worked: bool = False
    begun_ns: int = 0
    entered_ns: int = 0
    trust: Trust = field(default_factory=Trust)
    key: str = ""
    unwelcome: str = ""
    clock: FarClock = field(default_factory=FarClock)

    @property
    def entered(self) -> bool:
        """It said HELLO and is not given up."""
        return self.state in ("ready", "frozen")

    @property
    def runs(self) -> bool:
        """Its process, if it was started here, has not ended."""
        return self.spawned is not None and self.spawned.exit_code() is None

    def other_model(self, hello: Hello) -> str | None:
        """Why what says `hello` can't go on in this one's place: it runs another model, whose texts are others."""
        known = self.hello
        if known is None or _what_runs(known) == _what_runs(hello):
            return None
        return f"{self} came back with another model ({hello.model}) than before ({known.model}); restart the server"

    @property
    def load_s(self) -> float:
        """How long its start took; 0: that is not known."""
        return (self.entered_ns - self.begun_ns) / SECOND_NS if self.begun_ns and self.entered_ns else 0.0

    def stood_ns(self, now_ns: int) -> int:
        """How long it has been one of the cluster."""
        return now_ns - self.entered_ns if self.entered_ns else 0

    def why_gone(self, seconds_a_ping: float) -> str | None:
        """Why it must be given up: its process ended, or nothing is heard of it for too long."""
        code = self.spawned.exit_code() if self.spawned else None
        if self.spawned and code is not None:
            tail = self.spawned.log_tail()
            cause = memory.likely_cause(code, tail)
            ended = f"{self} ended with code {code}" + (f", {cause}" if cause else "")
            return self.fault or ended + (f": {tail}" if tail else "")
        if self.unwelcome:
            return f"{self} is dismissed: {self.unwelcome}"
        silence = self.pulse.gone(seconds_a_ping) if self.entered else self.pulse.stuck(seconds_a_ping)
        return f"{self} {silence}" if silence else None

    def stats(self) -> WorkerStats:
        hello = self.hello
        pid = self.spawned.pid if self.spawned else hello.pid if hello else 0
        if hello is None:
            return WorkerStats(
                self.role, self.name, self.state, pid, "", "", 0, 0, 0, 0, self.fault, lies=self.trust.tallies()
            )
        note = self.fault or hello.note
        return WorkerStats(
            self.role,
            self.name,
            self.state,
            pid,
            hello.backend,
            hello.model,
            hello.vocab_size,
            hello.context_length,
            hello.parameters,
            hello.weight_bytes,
            note,
            hello.kv,
            self.cache,
            self.restarts,
            self.trust.tallies(),
            self.clock.round_trip_ns / MILLISECOND_NS,
            0.0 if self.spawned else self.clock.ahead_ns(clock.now()) / MILLISECOND_NS,
            "-".join(filter(None, (hello.files, hello.number_format))),
        )

    def __str__(self) -> str:
        return f"{self.role} worker {self.name}"


@dataclass(frozen=True, slots=True)
class Loss:
    """A drafter that nobody should wait for, or a worker that is `gone`; `fatal`: the server can't do without it."""

    worker: Worker
    why: str
    gone: bool = False
    fatal: bool = False


def _what_runs(hello: Hello) -> tuple[object, ...]:
    sizes = hello.vocab_size, hello.context_length, hello.parameters, hello.weight_bytes
    return hello.backend, *sizes, hello.files, hello.number_format


def reads_alike(reader: Hello, target: Hello) -> bool:
    """Whether what this prefill worker remembers of a prompt is what the target itself would.

    Where the target's activations are rounded (`int8-...`) the same kernels must have made it, bit by bit.
    """
    same = reader.number_format == target.number_format or not target.number_format.startswith("int8-")
    return same and reader.files == target.files


def misfit(drafter: Hello, target: Hello) -> str:
    """Why this drafter can't read what this target tells, in a sentence; empty: it can, or reads nothing of it."""
    if not drafter.features or drafter.features == target.features:
        return ""
    made = f"provides those of {target.features}" if target.features else "makes none"
    why = f" ({target.note})" if target.note and not target.features else ""
    return (
        f"{drafter.model} reads features of {drafter.features}, and the target {made}{why}; expected the same head and"
        " the same model on both sides"
    )
