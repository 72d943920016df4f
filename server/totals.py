"""The orchestrator's own counts for Prometheus: all requests', those of other clients too, in the names of vLLM.

Reads `Stats` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.protocol import errors
from outrider.protocol.messages import Stats
from outrider.protocol.tallies import Durations

REASONS = ("eos", "stop", "length", "cancelled")
STATES = ("starting", "ready", "refused", "frozen", "restarting", "lost")
KINDS = tuple(name for name, kind in vars(errors).items() if isinstance(kind, type))
_PREFIX = "outrider:"
Values = Iterable[tuple[tuple[str, ...], float]]


class Totals(Collector):
    """What `stats` says of the model called `model`; None: the orchestrator does not answer."""

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
            yield durations(
                self._model, "round_duration_seconds", "From a request's verify to its next", stats.round_seconds
            )
            yield durations(self._model, "verify_duration_seconds", "The target's forwards", stats.verify_seconds)

    def _now(self, stats: Stats) -> Iterator[Metric]:
        limit = max(stats.kv.limit, 1)
        for name, told, value in (
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
            yield self._gauge(name, told, [((), value)])
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
        for name, told, count in (
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
            yield self._counter(name, told, [((), count)])

    def _speculation(self, stats: Stats) -> Iterator[Metric]:
        totals = stats.totals
        for name, told, count in (
            ("rounds", "Verifies, plain steps included", totals.rounds),
            ("spec_decode_num_drafts", "Verifies that carried a chain", totals.draft_rounds),
            ("spec_decode_num_draft_tokens", "Draft tokens verified", totals.draft_n),
            ("spec_decode_num_accepted_tokens", "Accepted draft tokens", totals.draft_n_accepted),
            ("speculation_cache_hits", "Speculation cache hits", totals.cache_hits),
        ):
            yield self._counter(name, told, [((), count)])
        for name, told, counts in (
            ("spec_decode_num_draft_tokens_per_pos", "Draft tokens by position", totals.drafted_by_position),
            (
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted draft tokens by position",
                totals.accepted_by_position,
            ),
        ):
            yield self._counter(name, told, [((str(place),), count) for place, count in enumerate(counts)], "position")
        held = [((one.name,), one.count) for one in totals.draft_n_accepted_by]
        yield self._counter("drafter_accepted_tokens", "Accepted draft tokens by drafter", held, "worker")
        misses = {
            "branch": totals.cache_late,
            "copied": totals.missed_then_copied,
            "drafted": totals.missed_then_drafted,
            "plain": totals.missed_then_plain,
        }
        told = "Outcomes whose branch was not there, by what followed: the branch after a wait, copied text, a chain"
        told += " drafted just in time, a plain step"
        yield self._counter("speculation_cache_misses", told, [((k,), n) for k, n in misses.items()], "followed_by")

    def _gauge(self, name: str, told: str, values: Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(_PREFIX + name, told, labels=("model_name", *labels)), values)

    def _counter(self, name: str, told: str, values: Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(_PREFIX + name, told, labels=("model_name", *labels)), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
        for labels, value in values:
            family.add_metric((self._model, *labels), value)
        return family


def durations(model: str, name: str, told: str, seen: Durations) -> Metric:
    """A histogram."""
    family = HistogramMetricFamily(_PREFIX + name, told, labels=("model_name",))
    bounds = (*map(str, seen.bounds), "+Inf")
    buckets = list(zip(bounds, accumulate(seen.counts), strict=bool(seen.counts)))
    family.add_metric((model,), buckets or [("+Inf", 0)], seen.seconds)
    return family
