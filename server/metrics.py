"""Prometheus metrics: this process's counters and timers, and the orchestrator's totals at the time of the scrape.

Names and buckets follow vLLM's, with the prefix `outrider:` and additional shorter buckets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.orchestrator.client.dialogue import GenerationResult
from outrider.protocol import errors
from outrider.protocol.messages import Stats
from outrider.protocol.stats import Durations

if TYPE_CHECKING:  # OpenTelemetry is optional
    from outrider.server.tracing import ChoiceSpan


REASONS = ("eos", "stop", "length", "cancelled")
STATES = ("starting", "ready", "refused", "frozen", "restarting", "lost")
KINDS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type))
_PREFIX = "outrider:"
Values = Iterable[tuple[tuple[str, ...], float]]


class OrchestratorMetrics(Collector):
    """The orchestrator's totals, which include requests of other clients. `stats` is None if the orchestrator does not
    answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        yield GaugeMetricFamily(f"{_PREFIX}up", "Whether the orchestrator answers", value=float(stats is not None))
        if stats is not None:
            yield self._gauge("build_info", "Always 1; the label is the release", [((stats.version,), 1)], "version")
            yield from self._now(stats)
            yield from self._counts(stats)
            yield from self._speculation(stats)
            yield self._durations("round", "From a request's verify to its next", stats.round_seconds)
            yield self._durations("verify", "The target's forwards", stats.verify_seconds)

    def _now(self, stats: Stats) -> Iterator[Metric]:
        limit = max(stats.kv.limit, 1)
        for name, doc, value in (
            ("num_requests_running", "Requests in flight", stats.active),
            ("num_requests_waiting", "Waiting requests", stats.queued),
            ("kv_cache_usage_perc", "Share of KV memory that running requests use; 1: all", stats.kv.used / limit),
            (
                "kv_cache_reserved_perc",
                "Share of KV memory that running requests may grow to",
                stats.kv.reserved / limit,
            ),
            ("kv_cache_limit_bytes", "KV memory of all workers", stats.kv.limit),
            ("peak_memory_bytes", "The most MLX held in all workers during a request", stats.totals.peak_bytes),
        ):
            yield self._gauge(name, doc, [((), value)])
        workers = stats.workers
        states = [((w.name, w.role, state), w.state == state) for w in workers for state in STATES]
        yield self._gauge("worker_state", "Whether the worker is in this state", states, "worker", "role", "state")
        again = [((worker.name, worker.role), worker.restarts) for worker in workers]
        yield self._counter("worker_restarts", "Restarts of the worker", again, "worker", "role")
        lies = [((worker.name, lie.name), lie.count) for worker in workers for lie in worker.lies]
        yield self._counter("worker_lies", "Invalid messages of the worker", lies, "worker", "kind")
        trips = [((worker.name,), worker.round_trip_ms / 1000) for worker in workers if worker.round_trip_ms]
        yield self._gauge("worker_round_trip_seconds", "Round-trip time of a ping to the worker", trips, "worker")
        held = [((worker.name,), worker.cache.bytes) for worker in workers]
        yield self._gauge("prompt_cache_bytes", "Prompt cache of the worker", held, "worker")

    def _counts(self, stats: Stats) -> Iterator[Metric]:
        totals, endings = stats.totals, {one.name: one.count for one in stats.endings}
        ended = [((reason,), endings.get(reason, 0)) for reason in REASONS]
        yield self._counter("request_success", "Completed requests by finish reason", ended, "finished_reason")
        failed = [((kind,), endings.get(kind, 0)) for kind in KINDS]
        yield self._counter("request_failure", "Requests that were refused or failed, by error", failed, "error")
        for name, doc, count in (
            ("prompt_tokens", "Prompt tokens read, of requests that ended", totals.prompt_n),
            ("prefix_cache_queries", "Prompt cache queries, in tokens", totals.prompt_n + totals.cache_n),
            ("prefix_cache_hits", "Prompt cache hits, in tokens", totals.cache_n),
            ("generation_tokens", "Generated tokens, including running requests", stats.generated),
            ("texts_resumed", "Texts that continued on a replaced target", totals.resumed),
            ("drafters_rejoined", "Drafters that rejoined within a text", totals.rejoined),
            ("stale_messages", "Stale messages of workers", stats.stale_messages),
            (
                "dropped_branches",
                "Drafters' messages dropped because the speculation cache was full",
                stats.dropped_branches,
            ),
            ("rejected_frames", "Invalid frames", stats.rejected_frames),
        ):
            yield self._counter(name, doc, [((), count)])

    def _speculation(self, stats: Stats) -> Iterator[Metric]:
        totals = stats.totals
        for name, doc, count in (
            ("rounds", "Verifies, plain steps included", totals.rounds),
            ("spec_decode_num_drafts", "Verifies that carried a chain", totals.draft_rounds),
            ("spec_decode_num_draft_tokens", "Draft tokens verified", totals.draft_n),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens", totals.draft_n_accepted),
            ("speculation_cache_hits", "Speculation cache hits", totals.cache_hits),
        ):
            yield self._counter(name, doc, [((), count)])
        for name, doc, counts in (
            ("spec_decode_num_draft_tokens_per_pos", "Draft tokens by position", totals.drafted_by_position),
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by position",
                totals.accepted_by_position,
            ),
        ):
            yield self._counter(name, doc, [((str(place),), count) for place, count in enumerate(counts)], "position")
        held = [((one.name,), one.count) for one in totals.draft_n_accepted_by]
        yield self._counter("drafter_accepted_tokens", "Accepted draft tokens by drafter", held, "worker")
        misses = [(("branch",), totals.cache_late)]
        misses += [((then,), getattr(totals, f"missed_then_{then}")) for then in ("copied", "drafted", "plain")]
        doc = "Outcomes whose branch was not there, by what followed: the branch after a wait, copied text, a chain"
        doc += " drafted just in time, a plain step"
        yield self._counter("speculation_cache_misses", doc, misses, "followed_by")

    def _gauge(self, name: str, doc: str, values: Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(_PREFIX + name, doc, labels=("model_name", *labels)), values)

    def _counter(self, name: str, doc: str, values: Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(_PREFIX + name, doc, labels=("model_name", *labels)), values)

    def _durations(self, name: str, doc: str, seen: Durations) -> Metric:
        family = HistogramMetricFamily(f"{_PREFIX}{name}_duration_seconds", doc, labels=("model_name",))
        bounds = (*map(str, seen.bounds), "+Inf")
        buckets = list(zip(bounds, accumulate(seen.counts), strict=bool(seen.counts)))
        family.add_metric((self._model,), buckets or [("+Inf", 0)], seen.seconds)
        return family

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for labels, value in values:
            family.add_metric((self._model, *labels), value)
        return family


class ProcessMetrics(Collector):
    """CPU time, memory and open files of this process, the orchestrator and the workers it started. Remote workers are
    excluded."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

    def collect(self) -> Iterator[Metric]:
        labels = ("process",)
        cpu = CounterMetricFamily("outrider:process_cpu_seconds", "CPU time, user and system", labels=labels)
        memory = GaugeMetricFamily("outrider:process_resident_memory_bytes", "Resident memory", labels=labels)
        files = GaugeMetricFamily("outrider:process_open_fds", "Open files and sockets", labels=labels)
        for name, process in self._all():
            try:
                with process.oneshot():
                    times, resident, opened = process.cpu_times(), process.memory_info().rss, process.num_fds()
            except psutil.Error:  # it has ended
                continue
            cpu.add_metric((name,), times.user + times.system)
            memory.add_metric((name,), resident)
            files.add_metric((name,), opened)
        yield from (cpu, memory, files)

    def _all(self) -> Iterator[tuple[str, psutil.Process]]:
        parent = os.getppid()
        workers = self.stats.workers if self.stats is not None else ()
        named = [("http", os.getpid()), ("orchestrator", parent), *((worker.name, worker.pid) for worker in workers)]
        for name, number in named:
            try:
                process = psutil.Process(number)
                if number in (os.getpid(), parent) or process.ppid() == parent:
                    yield name, process
            except psutil.Error:  # it has ended
                continue


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
    """The metrics of one server. `model` is the label `model_name`; `context` is the context length, if known."""

    def __init__(self, model: str, context: int | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call] # creation times are not needed
        self.registry = CollectorRegistry()
        self._model = model
        self._totals = OrchestratorMetrics(model)
        self._processes = ProcessMetrics()
        self.registry.register(self._totals)
        self.registry.register(self._processes)
        self._answers = Counter(
            "outrider:http_requests", "Answers by path and status", ("path", "status"), registry=self.registry
        )
        self.running = Gauge(
            "outrider:http_choices_running", "Choices in progress", ("model_name",), registry=self.registry
        ).labels(model)
        self.first = self._times("time_to_first_token", "Time to first token of a choice", _SECONDS)
        doc = "Between tokens; those that come together evenly"
        self.gaps = self._times("inter_token_latency", doc, _GAPS)
        self.whole = self._times("e2e_request_latency", "Duration of a choice", _WHOLE)
        self.queue = self._times("request_queue_time", "Time in the queue", _WHOLE)
        self.prefill = self._times("request_prefill_time", "From the turn to the first token", _WHOLE)
        self.decode = self._times("request_decode_time", "From the first token to the last", _WHOLE)
        tokens = _one_two_five(context or _MOST_TOKENS)
        self.prompt = self._histogram("request_prompt_tokens", "A choice's prompt, remembered tokens included", tokens)
        self.made = self._histogram("request_generation_tokens", "Tokens of a choice", tokens)

    def count_response(self, path: str, status: int) -> None:
        """Counts a response. `path` is the route's template."""
        self._answers.labels(path, str(status)).inc()

    def watch(self, span: ChoiceSpan | None = None) -> ChoiceTimer:
        """Returns a timer for a choice that starts now. It also reports to `span`."""
        return ChoiceTimer(self, span)

    def text(self, stats: Stats | None) -> bytes:
        """Returns the text that Prometheus reads, including `stats` if given."""
        self._totals.stats = self._processes.stats = stats
        return generate_latest(self.registry)

    def _times(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        return self._histogram(f"{name}_seconds", doc, buckets)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name",)
        return Histogram(f"outrider:{name}", doc, labels, buckets=buckets, registry=self.registry).labels(self._model)


class ChoiceTimer:
    """Times one choice. Only choices that complete are recorded."""

    def __init__(self, metrics: Metrics, span: ChoiceSpan | None) -> None:
        self._metrics = metrics
        self._span = span
        self._began = self._last = time.monotonic()
        self._tokens = 0
        metrics.running.inc()

    def grown(self, tokens: int) -> None:
        """Records that `tokens` arrived."""
        now = time.monotonic()
        if not self._tokens:
            self._metrics.first.observe(now - self._began)
            if self._span is not None:
                self._span.first()
        elif tokens:
            for _ in range(tokens):
                self._metrics.gaps.observe((now - self._last) / tokens)
        self._last = now
        self._tokens += tokens

    def ended(self, result: GenerationResult | None, error: Exception | None = None) -> None:
        """Records the end. `result` is None if the choice did not complete."""
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
    """Returns 1, 2, 5, 10, 20 ... up to `most`."""
    steps = (float(digit * 10**power) for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most)
