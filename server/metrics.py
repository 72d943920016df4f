"""Prometheus metrics: this process's counters and timers, and the orchestrator's totals at the time of the scrape.

Names follow vLLM's, with the prefix `outrider:`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.orchestrator.client.dialogue import GenerationResult
from outrider.protocol import errors
from outrider.protocol.messages import Stats
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import Durations

if TYPE_CHECKING:  # OpenTelemetry is optional
    from outrider.server.tracing import RequestSpan

FINISH_REASONS = ("eos", "stop", "length", "cancelled")
WORKER_STATES = ("starting", "ready", "refused", "frozen", "restarting", "lost")
ERROR_KINDS = tuple(name for name, kind in vars(errors).items() if errors.OutriderError in getattr(kind, "__mro__", ()))
_PREFIX = "outrider:"
Family = type[GaugeMetricFamily] | type[CounterMetricFamily]
Values = float | Mapping[Any, float]
"""A value, or values by the tuples of their labels."""

SECONDS_BUCKETS = tuple(round(digit * 10.0**power, 4) for power in range(-3, 3) for digit in (1, 2, 3, 5, 7))
"""Bounds in seconds, from a millisecond to ten minutes, finer than vLLM's."""


class OrchestratorMetrics(Collector):
    """The orchestrator's processes and totals, of all clients' requests. `stats` is None if it does not answer."""

    def __init__(self, model: str, stats: Stats | None) -> None:
        self._model = model
        self._stats = stats
        self._gauge = partial(self._family, GaugeMetricFamily)
        self._counter = partial(self._family, CounterMetricFamily)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield from process_metrics(stats)
        yield GaugeMetricFamily(f"{_PREFIX}up", "Whether the orchestrator answers", value=float(stats is not None))
        if stats is not None:
            yield from self._collect_state(stats)
            yield from self._collect_counters(stats)
            yield from self._collect_speculation(stats)
            yield self._durations("round", "Time from one outcome of a request to its next", stats.round_seconds)
            yield self._durations("verify", "Time of the target's forwards", stats.verify_seconds)

    def _collect_state(self, stats: Stats) -> Iterator[Metric]:
        kv, workers, gauge, counter = stats.kv, stats.workers, self._gauge, self._counter
        limit = max(kv.limit, 1)
        yield gauge("build_info", "Always 1; the label is the release", {(stats.version,): 1}, "version")
        yield gauge("num_requests_running", "Requests in flight", stats.active)
        yield gauge("num_requests_waiting", "Waiting requests", stats.queued)
        yield gauge("kv_cache_usage_perc", "Share of KV memory that running requests use; 1: all", kv.used / limit)
        yield gauge("kv_cache_reserved_perc", "The same if all had their full length", kv.reserved / limit)
        yield gauge("kv_cache_limit_bytes", "KV memory of all workers", kv.limit)
        yield gauge("peak_memory_bytes", "Peak memory of target and drafters", stats.totals.peak_bytes)
        states = {(w.name, w.role, state): w.state == state for w in workers for state in WORKER_STATES}
        yield gauge("worker_state", "Whether the worker is in this state", states, "worker", "role", "state")
        again = {(worker.name, worker.role): worker.restarts for worker in workers}
        yield counter("worker_restarts", "Restarts of the worker", again, "worker", "role")
        invalid = {(w.name, kind): count for w in workers for kind, count in w.invalid_messages.items()}
        yield counter("worker_invalid_messages", "Invalid messages of the worker", invalid, "worker", "kind")
        trips = {(worker.name,): worker.round_trip_ms / 1000 for worker in workers if worker.round_trip_ms}
        yield gauge("worker_round_trip_seconds", "Round-trip time of a ping to the worker", trips, "worker")
        held = {(worker.name,): worker.cache.bytes for worker in workers}
        yield gauge("prompt_cache_bytes", "Memory of the worker's prompt cache", held, "worker")

    def _collect_counters(self, stats: Stats) -> Iterator[Metric]:
        totals, counter, endings = stats.totals, self._counter, stats.endings
        ended = {(reason,): endings.get(reason, 0) for reason in FINISH_REASONS}
        yield counter("request_success", "Completed requests by finish reason", ended, "finished_reason")
        failed = {(kind,): endings.get(kind, 0) for kind in ERROR_KINDS}
        yield counter("request_failure", "Requests that were refused or failed, by error", failed, "error")
        yield counter("prompt_tokens", "Prompt tokens read by requests that have ended", totals.prompt_n)
        yield counter("prefix_cache_queries", "Prompt tokens, cached or not", totals.prompt_n + totals.cache_n)
        yield counter("prefix_cache_hits", "Prompt tokens from the prompt cache", totals.cache_n)
        yield counter("generation_tokens", "Generated tokens, including running requests", stats.generated)
        yield counter("texts_resumed", "Texts that continued on a replaced target", totals.resumed)
        yield counter("drafters_rejoined", "Drafters that rejoined within a text", totals.rejoined)
        yield counter("stale_messages", "Stale messages of workers", stats.stale_messages)
        yield counter("dropped_branches", "Branches without room in the speculation cache", stats.dropped_branches)
        yield counter("rejected_frames", "Invalid frames", stats.rejected_frames)

    def _collect_speculation(self, stats: Stats) -> Iterator[Metric]:
        totals, counter = stats.totals, self._counter
        yield counter("rounds", "Verifies, plain steps included", totals.rounds)
        yield counter("spec_decode_num_drafts", "Verifies of a chain", totals.draft_rounds)
        yield counter("spec_decode_num_draft_tokens", "Draft tokens verified", totals.draft_n)
        yield counter("spec_decode_num_accepted_tokens", "Accepted draft tokens", totals.draft_n_accepted)
        yield counter("speculation_cache_hits", "Speculation cache hits", totals.cache_hits)
        for name, doc, counts in (
            ("draft", "Draft tokens by position", totals.drafted_by_position),
            ("accepted", "Accepted draft tokens by position", totals.accepted_by_position),
        ):
            places = {(str(place),): count for place, count in enumerate(counts)}
            yield counter(f"spec_decode_num_{name}_tokens_per_pos", doc, places, "position")
        held = {(name,): count for name, count in totals.draft_n_accepted_by.items()}
        yield counter("drafter_accepted_tokens", "Accepted draft tokens by drafter", held, "worker")
        misses = {(then,): getattr(totals, f"missed_then_{then}") for then in ("copied", "drafted", "plain")}
        misses[("branch",)] = totals.cache_late
        yield counter("speculation_cache_misses", "Misses, by what was verified next", misses, "followed_by")

    def _family(self, kind: Family, name: str, doc: str, values: Values, *labels: str) -> Metric:
        family = kind(_PREFIX + name, doc, labels=("model_name", *labels))
        for one, value in values.items() if isinstance(values, Mapping) else [((), values)]:
            family.add_metric((self._model, *one), value)
        return family

    def _durations(self, name: str, doc: str, seen: Durations) -> Metric:
        family = HistogramMetricFamily(f"{_PREFIX}{name}_duration_seconds", doc, labels=("model_name",))
        bounds = (*map(str, seen.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(seen.counts), strict=bool(seen.counts)))
        family.add_metric((self._model,), buckets or [("+Inf", 0)], seen.seconds)
        return family


def process_metrics(stats: Stats | None) -> Iterator[Metric]:
    """Yields CPU time, memory and open files of this process, the orchestrator and the workers that it started."""
    labels = ("process",)
    cpu = CounterMetricFamily("outrider:process_cpu_seconds", "CPU time, user and system", labels=labels)
    memory = GaugeMetricFamily("outrider:process_resident_memory_bytes", "Resident memory", labels=labels)
    files = GaugeMetricFamily("outrider:process_open_fds", "Open files and sockets", labels=labels)
    parent = os.getppid()
    workers = stats.workers if stats is not None else ()
    for name, number in [("http", os.getpid()), ("orchestrator", parent), *((w.name, w.pid) for w in workers)]:
        try:
            process = psutil.Process(number)
            if number not in (os.getpid(), parent) and process.ppid() != parent:
                continue
            with process.oneshot():
                times, resident, opened = process.cpu_times(), process.memory_info().rss, process.num_fds()
        except psutil.Error:  # it has ended
            continue
        cpu.add_metric((name,), times.user + times.system)
        memory.add_metric((name,), resident)
        files.add_metric((name,), opened)
    yield from (cpu, memory, files)


class Metrics:
    """The metrics of one server. `model` is the label `model_name`; `context` is the context length."""

    def __init__(self, model: str, context: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # creation times are not needed
        self.registry = CollectorRegistry()
        self._model = model
        self._answers = Counter(
            "outrider:http_requests", "Answers by path and status", ("path", "status"), registry=self.registry
        )
        self.running = Gauge(
            "outrider:http_choices_running", "Choices in progress", ("model_name",), registry=self.registry
        ).labels(model)
        self.ttft = self._histogram("time_to_first_token_seconds", "Time to first token of a choice")
        doc = "Time between tokens; tokens that arrive together share it equally"
        self.inter_token = self._histogram("inter_token_latency_seconds", doc)
        self.total = self._histogram("e2e_request_latency_seconds", "Duration of a choice")
        self.queue = self._histogram("request_queue_time_seconds", "Time in the queue")
        self.prefill = self._histogram("request_prefill_time_seconds", "From admission to first token")
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last")
        steps = (float(digit * 10**power) for power in range(len(str(context))) for digit in (1, 2, 5))
        tokens = tuple(step for step in steps if step <= context)
        self.prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a choice, cached or not", tokens)
        self.generated = self._histogram("request_generation_tokens", "Generated tokens of a choice", tokens)

    def count_response(self, path: str, status: int) -> None:
        """Counts a response. `path` is the route's template."""
        self._answers.labels(path, str(status)).inc()

    def text(self, stats: Stats | None) -> bytes:
        """Returns the text that Prometheus reads, including `stats` if given."""
        return generate_latest(OrchestratorMetrics(self._model, stats)) + generate_latest(self.registry)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...] = SECONDS_BUCKETS) -> Histogram:
        labels = ("model_name",)
        return Histogram(f"outrider:{name}", doc, labels, buckets=buckets, registry=self.registry).labels(self._model)


class ChoiceTimer:
    """Times a choice from its creation on, for metrics and the request's trace. Only complete choices are recorded."""

    def __init__(
        self, metrics: Metrics, span: RequestSpan | None, is_chat: bool, index: int, sampling: SamplingParams
    ) -> None:
        self._metrics = metrics
        self._span = span.start_choice(is_chat, index, sampling) if span is not None else None
        self._began = self._last = time.monotonic()
        self._tokens = 0
        metrics.running.inc()

    def record_tokens(self, tokens: int) -> None:
        """Records that `tokens` arrived."""
        now = time.monotonic()
        if not self._tokens:
            self._metrics.ttft.observe(now - self._began)
        elif tokens:
            for _ in range(tokens):
                self._metrics.inter_token.observe((now - self._last) / tokens)
        self._last = now
        self._tokens += tokens

    def finish(self, result: GenerationResult | None, error: Exception | None = None) -> None:
        """Records the end. `result` is None if the choice did not complete."""
        metrics = self._metrics
        if self._span is not None:
            self._span.end(result, error)
        metrics.running.dec()
        if result is None:
            return
        times = result.timings
        metrics.total.observe(time.monotonic() - self._began)
        metrics.queue.observe(times.queue_ms / 1000)
        metrics.prefill.observe(times.prompt_ms / 1000)
        metrics.decode.observe(times.predicted_ms / 1000)
        metrics.prompt.observe(result.prompt_tokens)
        metrics.generated.observe(len(result.token_ids))
