"""What happened in a fleet: by the second, and by request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tools.fleet.job import Job

# What a reader of these machines is served well by: the first token in so many seconds, then so many a second.
GOOD_FIRST, GOOD_RATE = 10.0, 5.0


@dataclass(frozen=True, slots=True)
class Look:
    """At a second: engines that serve, requests that run and that wait, at the gate or at an engine."""

    engines: int
    running: int
    waiting: int


@dataclass
class Tally:
    tokens: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    looks: list[Look] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def hears(self, job: Job, tokens: float, now: float, flows: float) -> None:
        """What flowed is shared out over its seconds."""
        job.wants(tokens, now, flows)
        begin = now - flows
        while flows and int(begin) < int(now):
            part = tokens * (int(begin) + 1 - begin) / (now - begin)
            self.tokens[int(begin)] += part
            tokens, begin = tokens - part, float(int(begin) + 1)
        self.tokens[int(now)] += tokens


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the requests that were asked in a time: seconds, and tokens a second.

    `first`, `queued`: to the first token, and until its turn; each p50, p99. `good`: tokens a second of requests served
    well. `busy`: the share of time in which targets worked. `broken`: requests whose engine was lost, `gaps`
    their readers' longest waits: p50, p99, longest.
    """

    asked: int
    ended: int
    rate: float
    good: float
    first: tuple[float, float]
    queued: tuple[float, float]
    busy: float
    broken: int
    gaps: tuple[float, float, float]


def percentile(values: Iterable[float], share: float) -> float:
    """The value that so many are at most; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def sums(tally: Tally, begin: float, end: float, busy: float) -> Sums:
    """Tokens that came, and requests that were asked, in this time; who never began has waited until the `end`."""
    jobs = [job for job in tally.jobs if begin <= job.asked < end]
    seconds = end - begin
    tokens = sum(count for second, count in tally.tokens.items() if begin <= second < end)
    firsts = [(job.first if job.first is not None else end) - job.asked for job in jobs]
    queues = [(job.begun if job.begun is not None else end) - job.asked for job in jobs]
    gaps = [job.gap for job in tally.jobs if job.broken]
    return Sums(
        len(jobs),
        sum(job.is_over for job in jobs),
        tokens / seconds,
        sum(job.answer for job in jobs if _is_good(job)) / seconds,
        (percentile(firsts, 0.5), percentile(firsts, 0.99)),
        (percentile(queues, 0.5), percentile(queues, 0.99)),
        busy,
        len(gaps),
        (percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps, default=0.0)),
    )


def _is_good(job: Job) -> bool:
    if not job.is_over or job.first is None:
        return False
    pace = (job.answer - 1) / (job.last - job.first) if job.last > job.first else GOOD_RATE
    return job.first - job.asked <= GOOD_FIRST and pace >= GOOD_RATE


def smooth(tally: Tally, seconds: int, over: int) -> Sequence[float]:
    """Tokens a second, each the mean of so many seconds around, as far as there are."""
    found = []
    for second in range(seconds):
        near = range(max(second - over // 2, 0), min(second - over // 2 + over, seconds))
        found.append(sum(tally.tokens.get(one, 0.0) for one in near) / len(near))
    return found
