"""Measures the ingress's cost for one reader: how much later a chunk arrives than at AsyncClient, how much longer a
request takes.

Ingress and client are measured in turn, beginning with a different one each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from outrider.bench.comparison.runs import Interval, Timed, bootstrap, ratio
from outrider.fleet.plan import FleetPlan, IngressPlan
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_tokens
from tools.fleet_failures.clockwork import Clockwork
from tools.fleet_failures.fleet import Fleet, answers, broadcast, until
from tools.fleet_failures.reader import Wanted, events
from tools.fleet_failures.rows import sessions

NAME, LENGTH, WARM_UP = "clockwork", 128, 2
# Limits: milliseconds that a chunk arrives later, and how many times longer a request takes.
LAG_MS, LONGER = 1.0, 1.03
MS = 1e6

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cost:
    """A value with its interval, and its limit, if it has one."""

    name: str
    value: float
    low: float
    high: float
    limit: float | None = None

    @property
    def missed(self) -> bool:
        return self.limit is not None and self.value > self.limit

    def __str__(self) -> str:
        limit = "" if self.limit is None else f", limit {self.limit:g}{': MISSED' if self.missed else ''}"
        return f"{self.name}: {self.value:.3f} [{self.low:.3f}, {self.high:.3f}]{limit}"


def measure(fleet: Fleet, pairs: int, screen: Screen) -> list[Cost]:
    """Measures chunks and whole requests.

    Raises:
        WorkerError: a text from the ingress differs.
    """
    with asyncio.Runner() as runner:
        return [*_lag(pairs, runner, screen), _longer(fleet, pairs, runner, screen)]


def _lag(pairs: int, runner: asyncio.Runner, screen: Screen) -> list[Cost]:
    """Measures chunks from their sending by a server to their reader."""
    from ray import serve

    from outrider.fleet.deployment import run

    screen.show("starting an ingress with a clockwork")
    wanted = Wanted((1, 2, 3), LENGTH, 0.0, 0)
    with closing(Clockwork()) as clockwork:
        run(
            FleetPlan(ServeSettings(), attached=(clockwork.endpoint,), ingress=IngressPlan(http=HttpSettings(port=0))),
            NAME,
        )
        try:
            ingress = _ingress()
            client = AsyncClient(clockwork.endpoint)
            lags = _in_turns(
                lambda: _stamps_by_ingress(ingress, wanted),
                lambda: stamps_by_client(client, wanted, runner),
                pairs,
                lambda number: screen.show(f"chunks: {number} of {pairs}"),
            )
        finally:
            serve.delete(NAME)
    by_ingress, by_client = ([float(np.median(text)) for text in way] for way in lags)
    later = bootstrap([gate_ms - client_ms for gate_ms, client_ms in zip(by_ingress, by_client, strict=True)], _median)
    lags_ms = (("ingress", by_ingress), ("client", by_client))
    each = [Cost(f"a chunk by the {name}, ms p50", *_interval(bootstrap(ms, _median))) for name, ms in lags_ms]
    return [Cost("a chunk later by the ingress, ms p50", *_interval(later), LAG_MS), *each]


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _interval(found: Interval) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _longer(fleet: Fleet, pairs: int, runner: asyncio.Runner, screen: Screen) -> Cost:
    """Measures whole requests of the tiny pair, both at the attached engine."""
    ingresses = fleet.ingresses()
    session = next(name for name, engine in sessions(fleet, ingresses) if engine.kind == "attached")
    client = AsyncClient(fleet.attached.endpoint)
    prompts = mixed_tokens(pairs)
    texts: tuple[list[str], list[str]] = ([], [])
    wanted = [Wanted(prompt, LENGTH, 0.0, 0) for prompt in prompts]
    by_ingress, by_client = iter([*wanted[:WARM_UP], *wanted]), iter([*wanted[:WARM_UP], *wanted])

    def through() -> Timed:
        began = time.perf_counter()
        received = events(ingresses[0], next(by_ingress).body, session)
        texts[0].append("".join(event["choices"][0]["text"] for event in received))
        return Timed(LENGTH, time.perf_counter() - began)

    def straight() -> Timed:
        began = time.perf_counter()
        texts[1].append(runner.run(_text(client, next(by_client))))
        return Timed(LENGTH, time.perf_counter() - began)

    times = _in_turns(through, straight, pairs, lambda number: screen.show(f"requests: {number} of {pairs}"))
    if texts[0] != texts[1]:
        raise WorkerError("texts differ between the ingress and the client; expected the same for the same seed")
    slower = _interval(ratio(times[1], times[0]))
    return Cost(f"a request of {LENGTH} tokens, by the ingress / by the client", *slower, LONGER)


def _in_turns(
    first: Callable[[], T], second: Callable[[], T], pairs: int, show: Callable[[int], object]
) -> tuple[list[T], list[T]]:
    """Calls both `pairs` times in turn, after a warm-up, and returns their results."""
    functions, results = (first, second), (list[T](), list[T]())
    for number in range(-WARM_UP, pairs):
        show(max(number, 0))
        for index in (0, 1) if number % 2 else (1, 0):
            result = functions[index]()
            if number >= 0:
                results[index].append(result)
    return results


def _ingress() -> str:
    until(lambda: broadcast("ingress", "url", NAME), "the clockwork's ingress does not start")
    (url,) = broadcast("ingress", "url", NAME)
    until(lambda: answers(url), "the clockwork's ingress does not answer")
    return str(url)


def _stamps_by_ingress(ingress: str, wanted: Wanted) -> list[float]:
    lags: list[float] = []
    for event in events(ingress, wanted.body):
        lags += _under_way("".join(choice["text"] for choice in event["choices"]))
    return lags


def stamps_by_client(client: AsyncClient, wanted: Wanted, runner: asyncio.Runner) -> list[float]:
    lags: list[float] = []

    async def ask() -> None:
        await client.stream(wanted.prompt, _sampling(wanted)).follow(lambda chunk: lags.extend(_under_way(chunk.text)))

    runner.run(ask())
    return lags


def _under_way(text: str) -> list[float]:
    """Returns the milliseconds since each time in a text."""
    now = time.perf_counter_ns()
    return [(now - int(sent)) / MS for sent in text.split()]


async def _text(client: AsyncClient, wanted: Wanted) -> str:
    return (await client.stream(wanted.prompt, _sampling(wanted)).follow(lambda _: None)).text


def _sampling(wanted: Wanted) -> SamplingParams:
    return SamplingParams(max_tokens=wanted.length, temp=wanted.temp, seed=wanted.seed, ignore_eos=True)
