"""What Prometheus reads: counts of this process, and the orchestrator's totals as of the moment it asks.

Names follow vLLM's, with `outrider:` before them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.orchestrator.client.result import GenerationResult
from outrider.protocol.messages import Stats, Timings

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics:
    """One server's."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._totals = Totals()
        self.registry.register(self._totals)
        answers, name = Counter("outrider:http_requests", "Answers by path and status", ("path", "status"),
                                registry=self.registry), ("model_name",)  # fmt: skip
        self._answers = answers
        self._first = Histogram("outrider:time_to_first_token_seconds", "From a request to its first text", name,
                                buckets=_SECONDS, registry=self.registry).labels(model)  # fmt: skip
        self._gaps = Histogram("outrider:inter_token_latency_seconds", "Between tokens, those of a round evenly", name,
                               buckets=_GAPS, registry=self.registry).labels(model)  # fmt: skip
        self._whole = Histogram("outrider:e2e_request_latency_seconds", "From a request to its end", name,
                                buckets=_SECONDS, registry=self.registry).labels(model)  # fmt: skip
        self._running = Gauge("outrider:http_choices_running", "Choices begun and not ended", name,
                              registry=self.registry).labels(model)  # fmt: skip

    def answered(self, path: str, status: int) -> None:
        self._answers.labels(path, str(status)).inc()

    def watch(self) -> Watch:
        """For one choice that begins now."""
        return Watch(self._first, self._gaps, self._whole, self._running)

    def text(self, stats: Stats | None) -> bytes:
        """All of it, with the orchestrator's `stats` if it answered."""
        self._totals.stats = stats
        return generate_latest(self.registry)


class Watch:
    """Times one choice."""

    def __init__(self, first: Histogram, gaps: Histogram, whole: Histogram, running: Gauge) -> None:
        self._first, self._gaps, self._whole, self._running = first, gaps, whole, running
        self._began = self._last = time.monotonic()
        self._tokens = 0
        running.inc()

    def grown(self, tokens: int) -> None:
        """So many tokens came."""
        now = time.monotonic()
        if not self._tokens:
            self._first.observe(now - self._began)
        elif tokens:
            for _ in range(tokens):
                self._gaps.observe((now - self._last) / tokens)
        self._last = now
        self._tokens += tokens

    def ended(self, result: GenerationResult | None) -> None:
        """However it ended; None: not well."""
        self._running.dec()
        if result is not None:
            self._whole.observe(time.monotonic() - self._began)


class Totals(Collector):
    """The orchestrator's own counts, in the names that vLLM gives them."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        yield GaugeMetricFamily("outrider:up", "Whether the orchestrator answers", value=float(stats is not None))
        if stats is None:
            return
        totals = stats.totals
        for name, told, gauge in (
            ("num_requests_running", "Requests in flight", stats.active),
            ("num_requests_waiting", "Requests in line", stats.queued),
        ):
            yield GaugeMetricFamily(f"outrider:{name}", told, value=gauge)
        for name, told, count in (
            ("requests_finished", "Requests that ended well", stats.finished),
            ("requests_failed", "Requests that did not", stats.failed),
            ("prompt_tokens", "Prompt tokens read", totals.prompt_n),
            ("prefix_cache_queries", "Prompt tokens looked for among what was read before", _prompts(totals)),
            ("prefix_cache_hits", "Prompt tokens that did not have to be read again", totals.cache_n),
            ("generation_tokens", "Tokens made", totals.predicted_n),
            ("rounds", "Verifies", totals.rounds),
            ("spec_decode_num_drafts", "Verifies that carried a chain", totals.draft_rounds),
            ("spec_decode_num_draft_tokens", "Draft tokens verified", totals.draft_n),
            ("spec_decode_num_accepted_tokens", "Draft tokens that held", totals.draft_n_accepted),
            ("speculation_cache_hits", "Outcomes whose branch was there", totals.cache_hits),
            ("speculation_cache_misses", "Outcomes whose branch was not", totals.cache_misses),
            ("speculation_cache_late", "Misses whose branch came while it was waited for", totals.cache_late),
            ("stale_messages", "Messages dropped as stale", stats.stale_messages),
        ):
            yield CounterMetricFamily(f"outrider:{name}", told, value=count)
        accepted = CounterMetricFamily(
            "outrider:spec_decode_num_accepted_tokens_per_pos", "Draft tokens that held, by place", labels=["position"]
        )
        for place, count in enumerate(totals.accepted_by_position):
            accepted.add_metric([str(place)], count)
        yield accepted
        workers = GaugeMetricFamily("outrider:worker", "1 in the state it is in", labels=["name", "role", "state"])
        for worker in stats.workers:
            workers.add_metric([worker.name, worker.role, worker.state], 1)
        yield workers


def _prompts(totals: Timings) -> int:
    return totals.prompt_n + totals.cache_n
