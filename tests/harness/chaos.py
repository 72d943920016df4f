"""Kills and stops workers at random during requests, and checks that no text changes.

    python -m tests.harness.chaos                       # 500 strikes
    python -m tests.harness.chaos --kills 12 --seed 7

SIGKILL or SIGSTOP hits the drafter, the target or both after a random number of chunks; four requests are always in
flight, in all modes, T = 0 and 0.8, with penalties, biases, filters and stop strings. The next strike follows when all
workers have returned and chunks arrive. The undisturbed texts are generated before, on the same cluster. Prints how
long no chunk arrived. The exit code is 1 if a text differs (certified ties are listed and count as equal), a request
fails, or a worker does not return.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.bench.comparison.runs import Arrival
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from outrider.protocol.errors import OutriderError, WorkerError
from tests.harness.default_model import all_prompt_tokens, default_codec
from tests.harness.random_identity import DIFFERENT, SAME, Comparison, compare_reply, count_verdicts
from tests.harness.random_requests import MODES, Sizes, draw_prompt, draw_request
from tests.harness.requests import send, send_all

VICTIMS = (("draft",), ("target",), ("draft", "target"))
AT_ONCE = 4
MOST_CHUNKS = 24
TIMEOUT_S = 150.0  # longer than the longest wait for a restart, and a load
POLL_S = 0.02
WORKER_TIMEOUT = 2
SIZES = Sizes(prompt=200, text=160)


class ChunkCounter:
    """Counts the chunks of all requests."""

    def __init__(self) -> None:
        self._count = 0
        self._grown = threading.Condition()

    def record(self, _: Arrival) -> None:
        with self._grown:
            self._count += 1
            self._grown.notify_all()

    def wait(self, more: int) -> None:
        """Waits until `more` chunks have arrived. Raises WorkerError after `TIMEOUT_S` seconds."""
        with self._grown:
            until = self._count + more
            if not self._grown.wait_for(lambda: self._count >= until, TIMEOUT_S):
                raise WorkerError(f"no chunk has arrived for {TIMEOUT_S:.0f} s")


class ClusterFault(Protocol):
    """A fault that can be injected into a cluster during requests."""

    def inject(self, client: Client, chunks: ChunkCounter) -> FaultEffect:
        """Waits until it is due, causes the fault, and waits until the cluster has recovered.

        Raises:
            WorkerError: the cluster does not recover.
        """
        ...


@dataclass(frozen=True, slots=True)
class FaultEffect:
    """The effect of a fault: seconds until chunks arrived again, and until all workers had returned."""

    fault: ClusterFault
    pause_s: float
    resumed_s: float


@dataclass(frozen=True, slots=True)
class Strike:
    """Sends a signal to workers of these roles, after this many more chunks."""

    roles: tuple[str, ...]
    number: signal.Signals
    after: int

    def __str__(self) -> str:
        return f"{self.number.name} {' and '.join(self.roles)}"

    def inject(self, client: Client, chunks: ChunkCounter) -> FaultEffect:
        chunks.wait(self.after)
        before = {worker.name: worker.pid for worker in client.stats().workers if worker.role in self.roles}
        for pid in before.values():
            os.kill(pid, self.number)
        began = time.monotonic()
        _wait_until_ready(client, before)
        ready = time.monotonic()
        chunks.wait(1)
        return FaultEffect(self, time.monotonic() - began, time.monotonic() - ready)


def strikes(count: int, seed: int) -> Iterator[Strike]:
    """Yields `count` random strikes."""
    rng = random.Random(f"strikes {seed}")
    for _ in range(count):
        number = rng.choice((signal.SIGKILL, signal.SIGSTOP))
        yield Strike(rng.choice(VICTIMS), number, rng.randint(1, MOST_CHUNKS))


def _wait_until_ready(client: Client, before: dict[str, int]) -> None:
    """Waits until all workers are ready, those named in `before` with new processes. Raises WorkerError."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        workers = client.stats().workers
        if all(worker.state == "ready" and before.get(worker.name) != worker.pid for worker in workers):
            return
        time.sleep(POLL_S)
    raise WorkerError(f"not all workers came back within {TIMEOUT_S:.0f} s; stats say {client.stats().workers}")


class Load:
    """A continuous load on `client`'s cluster. Each text is compared with the one that the same request had before,
    without concurrent requests.

    `cancels`: some requests are cancelled. `waits_ms`: the longest wait for a chunk of each text. `failed`: the errors.
    """

    def __init__(self, client: Client, count: int, seed: int, cancels: bool = False) -> None:
        self._client, self._codec, source = client, default_codec(), all_prompt_tokens()
        prompts = [draw_prompt(number // len(MODES), seed, source, SIZES) for number in range(count)]
        requests = [replace(draw_request(n, seed, one), after=0.0) for n, one in enumerate(prompts)]
        uncancelled = [replace(one, until=None) for one in requests]
        self._requests = requests if cancels else uncancelled
        self._references = list(send_all(client, uncancelled, 1))
        self._over = threading.Event()
        self.chunks = ChunkCounter()
        self.comparisons: list[Comparison] = []
        self.waits_ms: list[float] = []
        self.failed: list[str] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keeps `AT_ONCE` requests in flight during the block, and then waits for the last ones."""
        with ThreadPoolExecutor(AT_ONCE) as threads:
            senders = [threads.submit(self._send_repeatedly, number) for number in range(AT_ONCE)]
            try:
                yield
            finally:
                self._over.set()
        for one in senders:
            one.result()

    def _send_repeatedly(self, number: int) -> None:
        while not self._over.is_set():
            at = number % len(self._requests)
            request, reference = self._requests[at], self._references[at]
            try:
                reply = send(self._client, request, self.chunks.record)
                self.waits_ms.append(max(reply.gaps_ms, default=0.0))
                self.comparisons.append(compare_reply(number, AT_ONCE, request, reply, reference, self._codec))
            except OutriderError as error:
                self.failed.append(f"request {number}: {type(error).__name__}: {error}")
            number += AT_ONCE


class ChaosRun(Load):
    """A load with faults."""

    effects: list[FaultEffect]

    def run(self, planned: Sequence[ClusterFault], screen: Screen) -> None:
        """Causes the faults. Raises WorkerError if the cluster does not recover."""
        self.effects = []
        with self.running():
            for number, fault in enumerate(planned):
                screen.show(f"fault {number + 1} of {len(planned)}: {fault}; {len(self.comparisons)} texts")
                self.effects.append(fault.inject(self._client, self.chunks))


def run_and_report(
    chaos_run: ChaosRun, planned: Sequence[ClusterFault], screen: Screen, report: Callable[[ChaosRun], str]
) -> int:
    """Causes the faults, and prints the texts that differ and the report. Returns the exit code."""
    failed = chaos_run.failed
    try:
        chaos_run.run(planned, screen)
    except OutriderError as error:
        failed.append(f"{type(error).__name__}: {error}")
    screen.clear()
    print("\n".join([*(str(one) for one in chaos_run.comparisons if one.verdict != SAME), report(chaos_run), *failed]))
    return int(bool(failed) or any(one.verdict == DIFFERENT for one in chaos_run.comparisons))


def report(chaos_run: ChaosRun) -> str:
    """Returns a summary of a few lines."""
    found, effects = chaos_run.comparisons, chaos_run.effects
    lines = [f"{len(effects)} strikes, {len(found)} texts: {count_verdicts(found)}"]
    for fault in sorted({name for one in effects if "target" in (name := str(one.fault))}):
        these = [one for one in effects if str(one.fault) == fault]
        pauses, resumed = [one.pause_s for one in these], [one.resumed_s for one in these]
        lines.append(
            f"{fault}: {len(these)} times, no chunk for {statistics.median(pauses):.1f} s (median),"
            f" {max(pauses):.1f} s (longest); all workers back after {max(resumed):.1f} s (longest)"
        )
    return "\n".join(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=500, metavar="N", help="number of strikes (default: 500)")
    parser.add_argument("--texts", type=int, default=24, metavar="N", help="different requests (default: 24)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of requests and strikes (default: 0)")


def run(options: argparse.Namespace) -> int:
    planned = list(strikes(values.check_int("kills", options.kills, 1, 1_000_000), options.seed))
    texts, screen = values.check_int("texts", options.texts, AT_ONCE, 10_000), Screen()
    with LocalCluster(progress=screen.show, max_active=AT_ONCE, worker_timeout=WORKER_TIMEOUT) as cluster:
        screen.show("undisturbed texts")
        chaos_run = ChaosRun(cluster.client(timeout=TIMEOUT_S), texts, options.seed)
        return run_and_report(chaos_run, planned, screen, report)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
