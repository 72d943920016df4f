"""A worker as the pool knows it, and the word that one is gone."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.orchestrator.core.pulse import Pulse
from outrider.orchestrator.machine.spawn import SpawnedWorker
from outrider.protocol.kv import CacheUse
from outrider.protocol.messages import Hello, WorkerStats


@dataclass(slots=True)
class Worker:
    """`state` is starting, ready, refused (of no use here), frozen (silent, and may come back) or lost.

    `spawned` None: it joined by itself. `kv_limit`: the bytes for texts that it was told.
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

    @property
    def entered(self) -> bool:
        """It said HELLO and is not given up."""
        return self.state in ("ready", "frozen")

    def why_gone(self, seconds_a_ping: float) -> str | None:
        """Why it must be given up: its process ended, or nothing is heard of it for too long."""
        code = self.spawned.exit_code() if self.spawned else None
        if self.spawned and code is not None:
            tail = self.spawned.log_tail()
            return self.fault or f"{self} ended with code {code}" + (f": {tail}" if tail else "")
        silence = self.pulse.gone(seconds_a_ping) if self.entered else None
        return f"{self} {silence}" if silence else None

    def stats(self) -> WorkerStats:
        hello = self.hello
        pid = hello.pid if hello else self.spawned.pid if self.spawned else 0
        if hello is None:
            return WorkerStats(self.role, self.name, self.state, pid, "", "", 0, 0, 0, 0, self.fault)
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
            hello.note,
            hello.kv,
            self.cache,
        )

    def __str__(self) -> str:
        return f"{self.role} worker {self.name}"


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that is gone, or a drafter that nobody should wait for. `started`: it had been ready before."""

    worker: Worker
    why: str
    started: bool
