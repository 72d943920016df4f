"""Messages between the orchestrator and a worker about the worker itself: its start, its health, its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.protocol.abilities import Abilities
from outrider.protocol.schema import Count, Name, Nanoseconds, RequestId, Role, Serial, Text
from outrider.protocol.stats import CacheUse, KvCost


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker -> orchestrator, when its model is loaded: its identity and its model. The answer is Welcome or Shutdown.

    - `incarnation` identifies this process, also among its successors. In hexadecimal it is the routing id of the hot
      socket; followed by `/heartbeat` it is that of the heartbeat socket.
    - `name` is the requested name, or empty.
    - `abilities` describes what a target can do, as measured; a drafter leaves the default. `kv` is the memory cost of
      its texts.
    - `vocabulary` is a digest of what a joining drafter's tokens stand for. It must equal the cluster's; empty: not
      checked.
    - `files` identifies a target's model (`protocol.digest`). `number_format` is what a target computes in.
    - `features` identifies the rows that a target sends in Features, or that a drafter reads; empty: none.
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
    """Orchestrator -> a worker that said Hello: it has joined the cluster under this name.

    `ping_ms` is the interval of the pings.
    """

    name: Name
    ping_ms: Count = 0


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Orchestrator -> worker, when all have joined and at each change: `limit` bytes for all its texts together.

    `prompt_cache`: ended texts may stay cached in what running ones do not need.
    """

    limit: Serial
    prompt_cache: bool = True


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Worker -> orchestrator: the use of its prompt cache, when it has changed."""

    use: CacheUse


@dataclass(frozen=True, slots=True)
class Loading:
    """Worker -> orchestrator, before Hello: the stage of the start, as text for a person."""

    role: Role
    stage: Name


@dataclass(frozen=True, slots=True)
class Ping:
    """Orchestrator -> a worker's heartbeat thread."""

    serial: Serial


@dataclass(frozen=True, slots=True)
class Pong:
    """Worker's heartbeat thread -> orchestrator. `progress` grows while the worker makes progress, busy or waiting.

    `expected_ms` is the longest that the current work should take until `progress` grows again; 0: not known.
    `clock_ns` is the worker's current time, by the clock of its spans.
    """

    name: Name
    serial: Serial
    progress: Serial
    expected_ms: Count = 0
    clock_ns: Nanoseconds = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """Worker -> orchestrator: an error. With `request` only that request is lost; without it the worker is.

    `dispensable`: nothing is broken, but the worker is of no use here, and the others may start without it.
    """

    name: Name
    request: RequestId | None
    message: Text
    dispensable: bool = False


@dataclass(frozen=True, slots=True)
class WorkerNote:
    """Worker -> orchestrator: a note for the readers of the texts under way. Nothing is lost."""

    name: Name
    message: Text


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Orchestrator -> worker: end in an orderly way. A `reason` means that it was rejected."""

    reason: Text = ""
