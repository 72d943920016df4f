"""The metrics of a simulated fleet by second and by request, and their summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools.fleet.job import Job

# A request is served well if its first token comes within these seconds, and the others at least at this rate.
MAX_FIRST_TOKEN_SECONDS, MIN_TOKENS_PER_SECOND = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample of one second: engines that serve, running requests, and waiting ones (at the ingress or an engine)."""

    engines: int
    running: int
    waiting: int


@dataclass
class Metrics:
    """`tokens` by second, a sample of every second, and all requests."""

    tokens: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    samples: list[Sample] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def record(self, job: Job, tokens: float, now: float, flows: float) -> None:
        """Records tokens of a request; a flow is distributed over its seconds."""
        job.receive(tokens, now, flows)
        begin = now - flows
        while flows and int(begin) < int(now):
            part = tokens * (int(begin) + 1 - begin) / (now - begin)
            self.tokens[int(begin)] += part
            tokens, begin = tokens - part, float(int(begin) + 1)
        self.tokens[int(now)] += tokens


@dataclass(frozen=True, slots=True)
class Summary:
    """Metrics of a period, in which `asked` requests were sent; times in seconds, rates in tokens per second.

    `first`, `queued`: p50 and p99 of the time to first token and in the queue. `good`: the rate of requests served
    well. `busy`: the share of time in which targets worked. `interrupted`: requests whose engine was lost.
    """

    asked: int
    ended: int
    rate: float
    good: float
    first: tuple[float, float]
    queued: tuple[float, float]
    busy: float
    interrupted: int


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the value that this share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def summarize(metrics: Metrics, begin: float, end: float, busy: float) -> Summary:
    """Summarizes the period from `begin` to `end`. A request that has not started has waited until `end`."""
    jobs = [job for job in metrics.jobs if begin <= job.sent < end]
    seconds = end - begin
    tokens = sum(count for second, count in metrics.tokens.items() if begin <= second < end)
    firsts = [(job.first if job.first is not None else end) - job.sent for job in jobs]
    queues = [(job.started if job.started is not None else end) - job.sent for job in jobs]
    return Summary(
        len(jobs),
        sum(job.is_complete for job in jobs),
        tokens / seconds,
        sum(job.answer for job in jobs if _is_good(job)) / seconds,
        (percentile(firsts, 0.5), percentile(firsts, 0.99)),
        (percentile(queues, 0.5), percentile(queues, 0.99)),
        busy,
        sum(job.interruptions > 0 for job in metrics.jobs),
    )


def _is_good(job: Job) -> bool:
    if not job.is_complete or job.first is None:
        return False
    pace = (job.answer - 1) / (job.last - job.first) if job.last > job.first else MIN_TOKENS_PER_SECOND
    return job.first - job.sent <= MAX_FIRST_TOKEN_SECONDS and pace >= MIN_TOKENS_PER_SECOND


def smooth_rates(metrics: Metrics, seconds: int, over: int) -> Sequence[float]:
    """Returns the tokens per second, each averaged over up to `over` seconds around it."""
    found = []
    for second in range(seconds):
        near = range(max(second - over // 2, 0), min(second - over // 2 + over, seconds))
        found.append(sum(metrics.tokens.get(s, 0.0) for s in near) / len(near))
    return found
