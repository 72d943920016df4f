"""Measures the overhead of the ingress for one reader, compared with AsyncClient: how much later a chunk arrives, and
how much longer a request takes.

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
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import mixed_tokens
from tools.fleet_failures.clock_server import ClockServer
from tools.fleet_failures.fleet import Fleet, broadcast, is_ready, wait_until
from tools.fleet_failures.kills import find_sessions
from tools.fleet_failures.reader import WantedText, stream_events

APP_NAME, TEXT_TOKENS, WARM_UP_TURNS = "clock-server", 128, 2
# Limits: milliseconds that a chunk arrives later, and how many times longer a request takes.
MAX_LAG_MS, MAX_REQUEST_RATIO = 1.0, 1.03
NS_PER_MS = 1e6

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cost:
    """A value, and its limit, if it has one."""

    name: str
    value: Interval
    limit: float | None = None

    @property
    def missed(self) -> bool:
        return self.limit is not None and self.value.value > self.limit

    def __str__(self) -> str:
        limit = "" if self.limit is None else f", limit {self.limit:g}{': MISSED' if self.missed else ''}"
        return f"{self.name}: {self.value:.3f}{limit}"


def measure(fleet: Fleet, pairs: int, screen: Screen) -> list[Cost]:
    """Measures chunks and whole requests.

    Raises:
        WorkerError: a text from the ingress differs.
    """
    with asyncio.Runner() as runner:
        return [*_measure_lag(pairs, runner, screen), _measure_request_ratio(fleet, pairs, runner, screen)]


def _measure_lag(pairs: int, runner: asyncio.Runner, screen: Screen) -> list[Cost]:
    """Measures chunks from their sending by a server to their reader."""
    from ray import serve

    from outrider.fleet.deployment import deploy

    screen.show("starting an ingress with a clock server")
    wanted = WantedText((1, 2, 3), TEXT_TOKENS, 0.0, 0)
    with closing(ClockServer()) as server:
        deploy(
            FleetPlan(ServeSettings(), attached=(server.endpoint,), ingress=IngressPlan(port=0)),
            APP_NAME,
        )
        try:
            ingress = _wait_for_ingress()
            client = AsyncClient(server.endpoint)
            lags = _alternate(
                lambda: _lags_by_ingress(ingress, wanted),
                lambda: lags_by_client(client, wanted, runner),
                pairs,
                lambda number: screen.show(f"chunks: {number} of {pairs}"),
            )
        finally:
            serve.delete(APP_NAME)
    by_ingress, by_client = ([float(np.median(text)) for text in way] for way in lags)
    later = bootstrap(
        [ingress_ms - client_ms for ingress_ms, client_ms in zip(by_ingress, by_client, strict=True)], _median
    )
    lags_ms = (("ingress", by_ingress), ("client", by_client))
    each = [Cost(f"a chunk by the {name}, ms p50", bootstrap(ms, _median)) for name, ms in lags_ms]
    return [Cost("a chunk later by the ingress, ms p50", later, MAX_LAG_MS), *each]


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _measure_request_ratio(fleet: Fleet, pairs: int, runner: asyncio.Runner, screen: Screen) -> Cost:
    """Measures whole requests of the tiny pair, both at the attached engine."""
    ingresses = fleet.ingresses()
    session = next(name for name, engine in find_sessions(fleet, ingresses) if engine.kind == "attached")
    client = AsyncClient(fleet.attached.endpoint)
    prompts = mixed_tokens(pairs)
    texts: tuple[list[str], list[str]] = ([], [])
    wanted = [WantedText(prompt, TEXT_TOKENS, 0.0, 0) for prompt in prompts]
    of_ingress, of_client = iter([*wanted[:WARM_UP_TURNS], *wanted]), iter([*wanted[:WARM_UP_TURNS], *wanted])

    def by_ingress() -> Timed:
        began = time.perf_counter()
        received = stream_events(ingresses[0], next(of_ingress).body, session)
        texts[0].append("".join(event["choices"][0]["text"] for event in received))
        return Timed(TEXT_TOKENS, time.perf_counter() - began)

    def by_client() -> Timed:
        began = time.perf_counter()
        texts[1].append(runner.run(_generate_text(client, next(of_client))))
        return Timed(TEXT_TOKENS, time.perf_counter() - began)

    times = _alternate(by_ingress, by_client, pairs, lambda number: screen.show(f"requests: {number} of {pairs}"))
    if texts[0] != texts[1]:
        raise WorkerError("texts differ between the ingress and the client; expected the same for the same seed")
    slower = ratio(times[1], times[0])
    return Cost(f"a request of {TEXT_TOKENS} tokens, by the ingress / by the client", slower, MAX_REQUEST_RATIO)


def _alternate(
    first: Callable[[], T], second: Callable[[], T], pairs: int, show: Callable[[int], object]
) -> tuple[list[T], list[T]]:
    """Calls both `pairs` times in turn, after a warm-up, and returns their results."""
    functions, results = (first, second), (list[T](), list[T]())
    for number in range(-WARM_UP_TURNS, pairs):
        show(max(number, 0))
        for index in (0, 1) if number % 2 else (1, 0):
            result = functions[index]()
            if number >= 0:
                results[index].append(result)
    return results


def _wait_for_ingress() -> str:
    wait_until(lambda: broadcast("ingress", "url", APP_NAME), "the clock server's ingress does not start")
    (url,) = broadcast("ingress", "url", APP_NAME)
    wait_until(lambda: is_ready(url), "the clock server's ingress does not answer")
    return str(url)


def _lags_by_ingress(ingress: str, wanted: WantedText) -> list[float]:
    lags: list[float] = []
    for event in stream_events(ingress, wanted.body):
        lags += _lags_in_ms("".join(choice["text"] for choice in event["choices"]))
    return lags


def lags_by_client(client: AsyncClient, wanted: WantedText, runner: asyncio.Runner) -> list[float]:
    lags: list[float] = []

    async def ask() -> None:
        await client.stream(wanted.prompt, _sampling(wanted)).follow(lambda chunk: lags.extend(_lags_in_ms(chunk.text)))

    runner.run(ask())
    return lags


def _lags_in_ms(text: str) -> list[float]:
    """Returns the milliseconds since each time in a text."""
    now = time.perf_counter_ns()
    return [(now - int(sent)) / NS_PER_MS for sent in text.split()]


async def _generate_text(client: AsyncClient, wanted: WantedText) -> str:
    return (await client.stream(wanted.prompt, _sampling(wanted)).follow(lambda _: None)).text


def _sampling(wanted: WantedText) -> SamplingParams:
    return SamplingParams(max_tokens=wanted.length, temp=wanted.temp, seed=wanted.seed, ignore_eos=True)
