"""Between the orchestrator and a worker about the worker itself: its start, its health, its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.abilities import Abilities
from outrider.protocol.schema import Count, Name, Nanoseconds, RequestId, Role, Serial, Text
from outrider.protocol.stats import CacheUse, KvCost


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker -> orchestrator, when its model is loaded: who I am and what I run. The answer is Welcome or Shutdown.

    `incarnation` tells this process from every other, its successors included; in hexadecimal it is the routing id of
    its hot socket, and followed by `/heartbeat` that of its heartbeat's. `name` is the one wished for, or empty.
    `abilities`: what a target was found able to do; a drafter leaves it as it is. `kv`: what its texts take.
    `vocabulary`: a digest of what a joining drafter's tokens stand for, which must be that of the cluster's own; empty:
    nobody has looked. `files`: a target's model, as `protocol.digest` tells models apart. `features`: of what a target
    makes the rows in Features, or what a drafter makes of them; empty: it makes none, or reads none. `number_format`:
    what a target computes in.
    """

    role: Role
    name: Name
    incarnation: Serial
    pid: Count
    backend: Name
    model: Name
    vocab_size: Count
    context_length: Count
    parameters: Serial
    weight_bytes: Serial
    note: Name = ""
    abilities: Abilities = field(default_factory=Abilities)
    kv: KvCost = field(default_factory=KvCost)
    vocabulary: Name = ""
    files: Name = ""
    features: Name = ""
    number_format: Name = ""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Orchestrator -> a worker that said Hello: it is one of the cluster now, by this name.

    `ping_ms`: it will be asked so often whether it lives.
    """

    name: Name
    ping_ms: Count = 0


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Orchestrator -> worker, once all are there and whenever it changes: `limit` bytes for all its texts together.

    `prompt_cache`: what ended texts leave behind may stay in what running ones don't need.
    """

    limit: Serial
    prompt_cache: bool = True


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Worker -> orchestrator: how its prompt cache is used, when that has changed."""

    use: CacheUse


@dataclass(frozen=True, slots=True)
class Loading:
    """Worker -> orchestrator, before Hello: how far the start is, for a person to read."""

    role: Role
    stage: Name


@dataclass(frozen=True, slots=True)
class Ping:
    """Orchestrator -> a worker's heartbeat thread."""

    serial: Serial


@dataclass(frozen=True, slots=True)
class Pong:
    """Worker's heartbeat thread -> orchestrator. `progress` grows while the worker moves, busy or waiting.

    `expected_ms`: how long what it does now should take at most, until it moves again; 0: it does not know. `clock_ns`:
    what time it is there, by the clock of its spans.
    """

    name: Name
    serial: Serial
    progress: Serial
    expected_ms: Count = 0
    clock_ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Worker -> orchestrator: what went wrong; with `request` only that request is lost, without it the worker is.

    `dispensable`: nothing is broken, the worker is of no use here, and the rest may begin without it.
    """

    name: Name
    request: RequestId | None
    message: Text
    dispensable: bool = False


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """Worker -> orchestrator: what readers of the texts under way should know. Nothing is lost."""

    name: Name
    message: Text


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Orchestrator -> worker: end now, in order. With a `reason` it was turned away."""

    reason: Text = ""
