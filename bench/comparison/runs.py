"""Interleaved runs of the same prompts, so that drift of the machine affects all equally, and their statistics.

A runner is a function: one of our modes with its K, or another engine on the same weights (`peers`). Rates are of
decoding: from the first generated token to the last. Bootstrap intervals use a fixed seed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias, TypeVar

from outrider.orchestrator.client.client import Client
from outrider.protocol.messages import RoundRecord, Span, Timings, WorkerStats
from outrider.protocol.sampling import SamplingParams

RESAMPLES = 2000
BOOTSTRAP_SEED = 0
COLOCATED = "colocated"
"""Part of the name of a runner with the draft model in the target's process."""
ONE_PROCESS = f"{COLOCATED} auto, all cores"
"""`auto` with both models in one process."""
SEED_STRIDE = 1000
"""The distance of the seeds of two rounds: more than the requests of a round, each of which has its own seed."""

T = TypeVar("T")
R = TypeVar("R")
Texts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return format(self, ".2f")

    def __format__(self, form: str) -> str:
        form = form or ".2f"
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True, slots=True)
class Timed:
    """Tokens, and the seconds in which they were generated."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def total_rate(runs: Sequence[Timed]) -> float:
    """Returns the tokens per second of all runs together; 0 if each has only one token."""
    return Timed(sum(run.tokens for run in runs), sum(run.seconds for run in runs)).rate


def ratio(ours: Sequence[Timed], theirs: Sequence[Timed]) -> Interval:
    """Returns the ratio of two rates on the same prompts; the interval comes from resampling prompts."""
    pairs = list(zip(ours, theirs, strict=True))

    def of(chosen: Sequence[tuple[Timed, Timed]]) -> float:
        rate = total_rate([pair[1] for pair in chosen])
        return total_rate([pair[0] for pair in chosen]) / rate if rate else 1.0  # texts of one token take no decoding

    return bootstrap(pairs, of)


def bootstrap(values: Sequence[T], estimate: Callable[[Sequence[T]], float]) -> Interval:
    """Returns the estimate on all values, with an interval from resampling them."""
    draw = random.Random(BOOTSTRAP_SEED)
    ordered = sorted(estimate(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Interval(estimate(values), ordered[int(0.025 * RESAMPLES)], ordered[int(0.975 * RESAMPLES)])


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """Returns the share of n-grams that occurred before in the same text; near 1, the text loops."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return (len(grams) - len(set(grams))) / len(grams) if grams else 0.0


def median_by_number(samples: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Returns the median of the values that have the same number, such as milliseconds by rows, in rising order."""
    values = defaultdict[int, list[float]](list)
    for number, value in samples:
        values[number].append(value)
    return {number: statistics.median(values[number]) for number in sorted(values)}


@dataclass(frozen=True, slots=True)
class Run:
    """The run of one prompt with one runner. `timings` is None for other engines."""

    tokens: tuple[int, ...]
    timed: Timed
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The `sums` over `runs`. `tokens` and `rounds` are of decoding, without the prompt's round."""

    runs: int
    sums: Timings

    @property
    def tokens(self) -> int:
        return self.sums.predicted_n - self.runs

    @property
    def rounds(self) -> int:
        return max(self.sums.rounds - self.runs, 0)

    @property
    def acceptance(self) -> float | None:
        """The share of drafted tokens that were accepted; None without drafted tokens."""
        drafted = sum(self.sums.drafted_by_position)
        return sum(self.sums.accepted_by_position) / drafted if drafted else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds and any(self.sums.drafted_by_position) else None

    @property
    def hit_rate(self) -> float | None:
        looked_up = sum(self.sums.looked_up_by_accepted)
        return sum(self.sums.hits_by_accepted) / looked_up if looked_up else None


def summarize(timings: Sequence[Timings]) -> Summary:
    return Summary(len(timings), sum(timings, Timings()))


def hit_turnarounds(rounds: Iterable[RoundRecord]) -> list[float]:
    """Returns the milliseconds of the target's wait before the verify of each hit that was served at once."""
    return [
        Span(before.verify.ended_ns, after.verify.started_ns).milliseconds
        for before, after in pairwise(rounds)
        if after.lookup == "hit" and after.round == before.round + 1
    ]


PromptRunner: TypeAlias = Callable[[Sequence[int], SamplingParams], Run]
"""Continues a prompt."""


def mode_runner(client: Client, mode: str, depth: int | None = None, branches: int | None = None) -> PromptRunner:
    """Returns a runner of one of our modes on a running cluster. `depth`, `branches` None: the cluster's K and B."""

    def run(prompt: Sequence[int], sampling: SamplingParams) -> Run:
        result = client.generate(prompt, sampling, mode=mode, num_draft_tokens=depth, branches=branches)
        times = result.timings
        return Run(result.token_ids, Timed(len(result.token_ids) - 1, times.predicted_ms / 1000), times)

    return run


def target_stats(client: Client) -> WorkerStats:
    return next(worker for worker in client.stats().workers if worker.role == "target")


def run_interleaved(
    runners: Mapping[str, Callable[[T, SamplingParams], R]],
    tasks: Sequence[T],
    sampling: SamplingParams,
    progress: Callable[[str], None],
    seeds: int = 1,
) -> dict[str, list[R]]:
    """Runs every task with every runner. Returns results by runner name, in task order.

    Every second task takes the runners in reverse, so that of any two each is first as often, and each pair of tasks
    begins with another runner. Task number n uses seed n * `seeds`.
    """
    runs: dict[str, list[R]] = {name: [] for name in runners}
    names = list(runners)
    for number, task in enumerate(tasks):
        chosen, first = replace(sampling, seed=seeds * number), number // 2 % len(names)
        order = (*names[first:], *names[:first])
        for name in order if number % 2 == 0 else order[::-1]:
            progress(f"{number + 1} of {len(tasks)}: {name}")
            runs[name].append(runners[name](task, chosen))
    return runs


class Arrival(NamedTuple):
    """The arrival of a chunk of `tokens` at the client, in seconds on the clock of `Reply.sent`."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished request with at least one arrival."""

    sent: float
    arrivals: tuple[Arrival, ...]

    @property
    def first_ms(self) -> float:
        """Time to first token."""
        return 1000 * (self.arrivals[0].at - self.sent)

    @property
    def ended(self) -> float:
        return self.arrivals[-1].at

    @property
    def gaps_ms(self) -> list[float]:
        """Times between chunks."""
        return [1000 * (after.at - before.at) for before, after in pairwise(self.arrivals)]

    @property
    def token_ms(self) -> list[float]:
        """The time of each token after the first chunk."""
        counts = [arrival.tokens for arrival in self.arrivals[1:]]
        return [gap / count for gap, count in zip(self.gaps_ms, counts, strict=True) for _ in range(count)]


def time_replies(replies: Sequence[Reply]) -> Timed:
    """Returns all tokens of concurrent requests, and the seconds from the first sending to the last end."""
    tokens = sum(arrival.tokens for reply in replies for arrival in reply.arrivals)
    return Timed(tokens, max(reply.ended for reply in replies) - min(reply.sent for reply in replies))


BatchRunner: TypeAlias = Callable[[Texts, SamplingParams], list[Reply]]
"""Completes all prompts, as many at once as it has slots."""


def mode_batch_runner(client: Client, mode: str, slots: int) -> BatchRunner:
    """Returns a runner of one of our modes. Request n uses the sampling's seed plus n."""

    def send(text: tuple[int, ...], sampling: SamplingParams) -> Reply:
        sent = time.perf_counter()
        chunks = client.stream(text, sampling, mode=mode)
        return Reply(sent, tuple(Arrival(time.perf_counter(), len(c.token_ids)) for c in chunks if c.token_ids))

    def run(texts: Texts, sampling: SamplingParams) -> list[Reply]:
        samplings = [replace(sampling, seed=(sampling.seed or 0) + n) for n in range(len(texts))]
        with ThreadPoolExecutor(slots) as threads:
            return list(threads.map(send, texts, samplings))

    return run
