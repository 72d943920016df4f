"""Between the orchestrator and a worker about the worker itself: its start, its health, its end."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.protocol.fields import (
    Count,
    Name,
    RequestId,
    Role,
    Serial,
    Text,
)


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker -> orchestrator, first: who I am and what I run. `incarnation` differs at each start of the process."""

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
    """Worker's heartbeat thread -> orchestrator. `progress` grows while the worker moves, busy or waiting."""

    name: Name
    serial: Serial
    progress: Serial


@dataclass(frozen=True, slots=True)
class Fault:
    """Worker -> orchestrator: what went wrong; with `request` only that request is lost, without it the worker is."""

    name: Name
    request: RequestId | None
    message: Text


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Orchestrator -> worker: end now, in order."""
