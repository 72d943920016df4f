"""What Prometheus reads: what this process counts and times, and the orchestrator's totals as of the moment it asks.

Names and buckets follow vLLM's, with `outrider:` before the names; times that are shorter here have buckets below its.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from outrider.orchestrator.client.result import GenerationResult
from outrider.protocol.messages import Stats
from outrider.protocol.tallies import Durations
from outrider.server.processes import Processes
from outrider.server.totals import Totals, durations

if TYPE_CHECKING:  # OpenTelemetry is there only where it is wanted
    from outrider.server.tracing import ChoiceSpan

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0,
)  # fmt: skip
_GAPS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_WHOLE = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
_MOST_TOKENS = 1 << 20


class Metrics:
    """One server's; `model` is the label `model_name`, `context` the most tokens of a text, if that is known."""

    def __init__(self, model: str, context: int | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # when each began is nothing that anybody asks
        self.registry = CollectorRegistry()
        self._model = model
        self._totals = Totals(model)
        self._processes = Processes()
        self.registry.register(self._totals)
        self.registry.register(self._processes)
        self._answers = Counter(
            "outrider:http_requests", "Answers by path and status", ("path", "status"), registry=self.registry
        )
        self.running = Gauge(
            "outrider:http_choices_running", "Choices in progress", ("model_name",), registry=self.registry
        ).labels(model)
        self.first = self._times("time_to_first_token", "Time to first token of a choice", _SECONDS)
        self.gaps = Gaps(model)
        self.registry.register(self.gaps)
        self.whole = self._times("e2e_request_latency", "Duration of a choice", _WHOLE)
        self.queue = self._times("request_queue_time", "Time in the queue", _WHOLE)
        self.prefill = self._times("request_prefill_time", "From the turn to the first token", _WHOLE)
        self.decode = self._times("request_decode_time", "From the first token to the last", _WHOLE)
        tokens = _one_two_five(context or _MOST_TOKENS)
        self.prompt = self._histogram("request_prompt_tokens", "A choice's prompt, remembered tokens included", tokens)
        self.made = self._histogram("request_generation_tokens", "Tokens of a choice", tokens)

    def answered(self, path: str, status: int) -> None:
        """`path` as the application has it, not as it was asked for."""
        self._answers.labels(path, str(status)).inc()

    def watch(self, span: ChoiceSpan | None = None) -> Watch:
        """For one choice that begins now; `span` is told the same."""
        return Watch(self, span)

    def text(self, stats: Stats | None) -> bytes:
        """All of it, with the orchestrator's `stats` if it answered."""
        self._totals.stats = self._processes.stats = stats
        return generate_latest(self.registry)

    def _times(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(f"{name}_seconds", told, buckets)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name",)
        return Histogram(f"outrider:{name}", told, labels, buckets=buckets, registry=self.registry).labels(self._model)


class Gaps(Collector):
    """The time between tokens, those that come together evenly: a histogram that takes several at once."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(_GAPS) + 1)
        self._seconds = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """So many tokens came, so long after those before."""
        self._counts[bisect_left(_GAPS, seconds / tokens)] += tokens
        self._seconds += seconds

    def collect(self) -> Iterator[Metric]:
        seen = Durations(_GAPS, tuple(self._counts), self._seconds)
        yield durations(
            self._model, "inter_token_latency_seconds", "Between tokens; those that come together evenly", seen
        )


class Watch:
    """Times one choice; of those that end well, all of it is counted."""

    def __init__(self, metrics: Metrics, span: ChoiceSpan | None) -> None:
        self._metrics = metrics
        self._span = span
        self._began = self._last = time.monotonic()
        self._tokens = 0
        metrics.running.inc()

    def grown(self, tokens: int) -> None:
        """So many tokens came."""
        now = time.monotonic()
        if not self._tokens:
            self._metrics.first.observe(now - self._began)
            if self._span is not None:
                self._span.first()
        elif tokens:
            self._metrics.gaps.add(now - self._last, tokens)
        self._last = now
        self._tokens += tokens

    def ended(self, result: GenerationResult | None, error: Exception | None = None) -> None:
        """However it ended; no result: not well."""
        metrics = self._metrics
        if self._span is not None:
            self._span.ended(result, error)
        metrics.running.dec()
        if result is None:
            return
        times = result.timings
        metrics.whole.observe(time.monotonic() - self._began)
        metrics.queue.observe(times.queue_ms / 1000)
        metrics.prefill.observe(times.prompt_ms / 1000)
        metrics.decode.observe(times.predicted_ms / 1000)
        metrics.prompt.observe(result.prompt_tokens)
        metrics.made.observe(len(result.token_ids))


def _one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20 ... up to `most`."""
    steps = (float(digit * 10**power) for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most)
