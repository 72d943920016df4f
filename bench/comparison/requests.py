"""Asks for several texts at once as clients do, and keeps when each chunk came.

`ask`: asks a server for texts as a client does, alone or many at once, and keeps when each chunk came.

`Reply`: one request as its client saw it: when it was sent, and when which tokens came. A token's time is the wait for
its chunk, shared by the chunk's tokens; a gap is the wait itself.

`ModeBatch`: ways to answer several requests at once: our modes, or a peer's batch of the same prompts on the same
weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from outrider.bench.comparison.peers import MLX_LM, PeerProcess
from outrider.bench.comparison.runs import Runner, Timed, run_interleaved, total_rate
from outrider.orchestrator.client.base_client import BaseClient
from outrider.orchestrator.client.client import Client
from outrider.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A chunk of so many tokens reached the client, seconds on the clock of `Reply.sent`."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished request: at least one arrival. `token_ids`, `text` and `reason` where whoever asked kept them;
    `cancelled` when the client left before the end."""

    sent: float
    arrivals: tuple[Arrival, ...]
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: str = ""
    cancelled: bool = False

    @property
    def first_ms(self) -> float:
        """From sending to the first token."""
        return 1000 * (self.arrivals[0].at - self.sent)

    @property
    def ended(self) -> float:
        return self.arrivals[-1].at

    @property
    def gaps_ms(self) -> list[float]:
        """Between one chunk and the next."""
        return [1000 * (after.at - before.at) for before, after in pairwise(self.arrivals)]

    @property
    def token_ms(self) -> list[float]:
        """The time of each token after the first chunk."""
        counts = [arrival.tokens for arrival in self.arrivals[1:]]
        return [gap / count for gap, count in zip(self.gaps_ms, counts, strict=True) for _ in range(count)]


def timed(replies: Sequence[Reply]) -> Timed:
    """All tokens of requests that ran together, over the time from the first one's sending to the last one's end."""
    tokens = sum(arrival.tokens for reply in replies for arrival in reply.arrivals)
    return Timed(tokens, max(reply.ended for reply in replies) - min(reply.sent for reply in replies))


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """What one client asks for, `after` so many seconds; it leaves once it has `until` tokens, None: at the end. K and
    B None: the server's own."""

    tokens: tuple[int, ...]
    sampling: SamplingParams
    mode: str
    after: float = 0.0
    until: int | None = None
    num_draft_tokens: int | None = None
    branches: int | None = None


def ask(client: BaseClient, question: TimedRequest, heard: Callable[[Arrival], None] = lambda _: None) -> Reply:
    """One request; `heard` is told of each chunk as it comes."""
    time.sleep(question.after)
    sent = time.perf_counter()
    stream = client.stream(
        question.tokens,
        question.sampling,
        mode=question.mode,
        num_draft_tokens=question.num_draft_tokens,
        branches=question.branches,
    )
    arrivals: list[Arrival] = []
    token_ids: list[int] = []
    texts: list[str] = []
    for chunk in stream:
        if chunk.token_ids:
            arrivals.append(Arrival(time.perf_counter(), len(chunk.token_ids)))
            heard(arrivals[-1])
        token_ids += chunk.token_ids
        texts.append(chunk.text)
        if question.until is not None and len(token_ids) >= question.until:
            return Reply(sent, tuple(arrivals), tuple(token_ids), "".join(texts), "cancelled", True)
    result = stream.result
    return Reply(sent, tuple(arrivals), result.token_ids, result.text, result.finish_reason)


def send_all(client: BaseClient, questions: Sequence[TimedRequest], places: int | None = None) -> Iterator[Reply]:
    """All at once, each `after` its time, or so many at once: who is answered, or has left, makes room for the next.

    The replies come in the questions' order; asking begins with the first that is wanted.
    """
    with ThreadPoolExecutor(places or len(questions)) as threads:
        yield from threads.map(lambda question: ask(client, question), questions)


# How many prompts mlx-lm may read in one forward: 8 is its own default; which is fastest here is tried.
PEER_READS = (1, 4, 8)
# More than there are requests in a round; each has its own.
SEEDS = 1000

Texts = Sequence[tuple[int, ...]]


BatchRunner: TypeAlias = Runner[Texts, list[Reply]]
"""Answers all of these prompts, so many at once as it has places."""


@dataclass(frozen=True, slots=True)
class ModeBatch:
    """One of ours; each request has a seed of its own, counted from the sampling's."""

    name: str
    client: Client
    places: int

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        first = sampling.seed or 0
        questions = [TimedRequest(text, replace(sampling, seed=first + n), self.name) for n, text in enumerate(texts)]
        return list(send_all(self.client, questions, self.places))


@dataclass(frozen=True, slots=True)
class PeerBatch:
    """A peer that answers a batch and tells when its tokens came; `asked` is what it alone is asked."""

    name: str
    process: PeerProcess
    asked: Mapping[str, int] = field(default_factory=dict)

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        told = self.process.ask({
            "batch": [list(text) for text in texts],
            "max_tokens": sampling.max_tokens,
            "temp": sampling.temp,
            "seed": sampling.seed or 0,
            **self.asked,
        })  # fmt: skip
        return [Reply(r["sent"], tuple(Arrival(at, n) for at, n in r["arrivals"])) for r in told["replies"]]


def best_mlx_lm(process: PeerProcess, places: int, rounds: Sequence[Texts], sampling: SamplingParams) -> PeerBatch:
    """mlx-lm's `BatchGenerator`, at its best setting on prompts that count nowhere else."""
    tried = [
        PeerBatch(f"{MLX_LM}, {reads} read together", process, {"places": places, "reads": reads})
        for reads in PEER_READS
        if reads <= places
    ]
    found = run_interleaved(tried, rounds, sampling, lambda _: None, seeds=SEEDS)
    best = max(tried, key=lambda way: total_rate([timed(replies) for replies in found[way.name]]))
    return replace(best, name=MLX_LM)
