"""Sends one or several requests at once, as clients do, and records when each chunk arrived.

A token's time is the wait for its chunk divided by the chunk's tokens; a gap is the wait itself.
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
    """A chunk of `tokens` reached the client, in seconds on the clock of `Reply.sent`."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished request with at least one arrival. `token_ids`, `text` and `reason` are optional. `cancelled`: the
    client left before the end."""

    sent: float
    arrivals: tuple[Arrival, ...]
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: str = ""
    cancelled: bool = False

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


def timed(replies: Sequence[Reply]) -> Timed:
    """All tokens of concurrent requests, over the time from the first sending to the last end."""
    tokens = sum(arrival.tokens for reply in replies for arrival in reply.arrivals)
    return Timed(tokens, max(reply.ended for reply in replies) - min(reply.sent for reply in replies))


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, sent `after` so many seconds. The client leaves after `until` tokens; None: at the end. K and B None:
    the server's own."""

    tokens: tuple[int, ...]
    sampling: SamplingParams
    mode: str
    after: float = 0.0
    until: int | None = None
    num_draft_tokens: int | None = None
    branches: int | None = None


def send(client: BaseClient, request: TimedRequest, heard: Callable[[Arrival], None] = lambda _: None) -> Reply:
    """Sends one request; `heard` receives each arrival."""
    time.sleep(request.after)
    sent = time.perf_counter()
    stream = client.stream(
        request.tokens,
        request.sampling,
        mode=request.mode,
        num_draft_tokens=request.num_draft_tokens,
        branches=request.branches,
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
        if request.until is not None and len(token_ids) >= request.until:
            return Reply(sent, tuple(arrivals), tuple(token_ids), "".join(texts), "cancelled", True)
    result = stream.result
    return Reply(sent, tuple(arrivals), result.token_ids, result.text, result.finish_reason)


def send_all(client: BaseClient, requests: Sequence[TimedRequest], places: int | None = None) -> Iterator[Reply]:
    """Sends all at once, each `after` its time, or at most `places` at once.

    Yields replies in the requests' order. Starts when the first reply is requested.
    """
    with ThreadPoolExecutor(places or len(requests)) as threads:
        yield from threads.map(lambda request: send(client, request), requests)


# Prompts per forward to try with mlx-lm; its default is 8.
PEER_READS = (1, 4, 8)
# More than the requests of a round; each has its own seed.
SEEDS = 1000

Texts = Sequence[tuple[int, ...]]


BatchRunner: TypeAlias = Runner[Texts, list[Reply]]
"""Completes all prompts, as many at once as it has places."""


@dataclass(frozen=True, slots=True)
class ModeBatch:
    """One of our modes; each request has its own seed, counted from the sampling's."""

    name: str
    client: Client
    places: int

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        first = sampling.seed or 0
        requests = [TimedRequest(text, replace(sampling, seed=first + n), self.name) for n, text in enumerate(texts)]
        return list(send_all(self.client, requests, self.places))


@dataclass(frozen=True, slots=True)
class PeerBatch:
    """A peer that completes a batch; `asked` are additional fields of its requests."""

    name: str
    process: PeerProcess
    asked: Mapping[str, int] = field(default_factory=dict)

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        answer = self.process.ask({
            "batch": [list(text) for text in texts],
            "max_tokens": sampling.max_tokens,
            "temp": sampling.temp,
            "seed": sampling.seed or 0,
            **self.asked,
        })  # fmt: skip
        return [Reply(r["sent"], tuple(Arrival(at, n) for at, n in r["arrivals"])) for r in answer["replies"]]


def best_mlx_lm(process: PeerProcess, places: int, rounds: Sequence[Texts], sampling: SamplingParams) -> PeerBatch:
    """mlx-lm's `BatchGenerator` with its best setting in a trial."""
    tried = [
        PeerBatch(f"{MLX_LM}, {reads} read together", process, {"places": places, "reads": reads})
        for reads in PEER_READS
        if reads <= places
    ]
    found = run_interleaved(tried, rounds, sampling, lambda _: None, seeds=SEEDS)
    best = max(tried, key=lambda way: total_rate([timed(replies) for replies in found[way.name]]))
    return replace(best, name=MLX_LM)
