"""Kills one part of the fleet while readers are in the middle of their texts, and records what they saw."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from outrider.protocol.errors import WorkerError
from tools.fleet_failures.fleet import Engine, Fleet, process_at_port, wait_until
from tools.fleet_failures.hosts import Hosts
from tools.fleet_failures.reader import IncompleteResponse, Reader, WantedText
from tools.fleet_failures.victims import KillContext, Victim

TOKENS_BEFORE_KILL = 24
"""Tokens that every reader has received before the kill."""
MAX_SESSIONS = 60


@dataclass(frozen=True, slots=True)
class ExpectedText:
    """A text to generate, and its tokens as the target generates them alone."""

    wanted: WantedText
    alone: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KillResult:
    """The results of one kill. In seconds: each reader's wait for its next token, and the time until the fleet was
    complete again (`whole`)."""

    waits: tuple[float, ...]
    texts: int
    differ: int
    errors: tuple[str, ...]
    whole: float


def kill_victim(hosts: Hosts, fleet: Fleet, victim: Victim, texts: Sequence[ExpectedText]) -> KillResult:
    """Kills `victim` while clients read `texts`.

    Raises:
        WorkerError: the fleet is not complete before, or not again afterwards.
    """
    fleet.wait_until_complete()
    ingresses = fleet.ingresses()
    session, engine, ingresses = _choose_session(hosts, fleet, victim, ingresses)
    plan = victim.plan(KillContext(hosts, fleet, engine, ingresses[0]))
    readers = [Reader(ingresses, text.wanted, session) for text in texts]
    with ThreadPoolExecutor(len(readers)) as threads:
        reading = [threads.submit(reader.read) for reader in readers]
        wait_until(
            lambda: all(len(reader.tokens) >= TOKENS_BEFORE_KILL for reader in readers), "readers receive no text"
        )
        if any(future.done() for future in reading):
            raise WorkerError("a text was complete before the kill; expected longer texts (--tokens)")
        killed_at = time.perf_counter()
        plan.kill()
        plan.repair()
        wait_until(
            lambda: all(_has_continued(killed_at, *pair) for pair in zip(readers, reading, strict=True)),
            "no text continues",
        )
        fleet.wait_until_complete()
        whole = time.perf_counter() - killed_at
        failed = [error for future in reading if (error := future.exception()) is not None]
    if failed and not isinstance(failed[0], IncompleteResponse):
        raise failed[0]
    differ = sum(tuple(reader.tokens) != text.alone for reader, text in zip(readers, texts, strict=True))
    waits = tuple(reader.wait(killed_at) for reader in readers if reader.has_continued(killed_at))
    return KillResult(
        waits, len(texts), differ, tuple(error for reader in readers for error in reader.interruptions), whole
    )


def _has_continued(killed_at: float, reader: Reader, reading: Future[None]) -> bool:
    return reading.done() or reader.has_continued(killed_at)


def _choose_session(hosts: Hosts, fleet: Fleet, victim: Victim, ingresses: list[str]) -> tuple[str, Engine, list[str]]:
    """Returns a session with an engine of the victim's kind, that engine, and ingresses, first one on another host."""
    for session, engine in find_sessions(fleet, ingresses):
        if engine.kind != victim.kind:
            continue
        host = hosts.of(engine.actor) if engine.kind == "placed" else None
        apart = [ingress for ingress in ingresses if hosts.of(process_at_port(ingress)) is not host]
        if apart:
            return session, engine, [apart[0], *(ingress for ingress in ingresses if ingress != apart[0])]
    raise WorkerError(f"no session has an engine that is {victim.kind} and on a host without an ingress")


def find_sessions(fleet: Fleet, ingresses: list[str]) -> Iterator[tuple[str, Engine]]:
    """Yields new sessions with their engines."""
    for number in range(MAX_SESSIONS):
        session = f"session {time.monotonic_ns()} {number}"
        before = {engine.endpoint: engine.stats.finished for engine in fleet.engines()}
        Reader(ingresses, WantedText((1, 2, 3), 1, 0.0, 0), session).read()
        after = [e for e in fleet.engines() if e.stats.finished > before.get(e.endpoint, e.stats.finished)]
        yield from ((session, engine) for engine in after)
