"""Sends single or concurrent requests, as clients do, and records when each chunk arrives.

A gap is the time between two chunks; a token's time is the gap before its chunk divided by the chunk's tokens.
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
    """The arrival of a chunk of `tokens` at the client, in seconds on the clock of `Reply.sent`."""

    at: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished request with at least one arrival. `token_ids`, `text` and `reason` are optional. `cancelled`: the
    client cancelled it."""

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
    """Returns all tokens of concurrent requests, and the seconds from the first sending to the last end."""
    tokens = sum(arrival.tokens for reply in replies for arrival in reply.arrivals)
    return Timed(tokens, max(reply.ended for reply in replies) - min(reply.sent for reply in replies))


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request that is sent `after` seconds, and cancelled after `until` tokens (None: not). K and B None: the
    server's."""

    tokens: tuple[int, ...]
    sampling: SamplingParams
    mode: str
    after: float = 0.0
    until: int | None = None
    num_draft_tokens: int | None = None
    branches: int | None = None


def send(client: BaseClient, request: TimedRequest, on_arrival: Callable[[Arrival], None] = lambda _: None) -> Reply:
    """Sends one request; calls `on_arrival` with each arrival."""
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
            on_arrival(arrivals[-1])
        token_ids += chunk.token_ids
        texts.append(chunk.text)
        if request.until is not None and len(token_ids) >= request.until:
            return Reply(sent, tuple(arrivals), tuple(token_ids), "".join(texts), "cancelled", True)
    result = stream.result
    return Reply(sent, tuple(arrivals), result.token_ids, result.text, result.finish_reason)


def send_all(client: BaseClient, requests: Sequence[TimedRequest], slots: int | None = None) -> Iterator[Reply]:
    """Sends all requests, each `after` its time, with at most `slots` at once (None: all).

    Yields replies in the requests' order. Starts when the first reply is requested.
    """
    with ThreadPoolExecutor(slots or len(requests)) as threads:
        yield from threads.map(lambda request: send(client, request), requests)


# Prompts per forward to try with mlx-lm; its default is 8.
PEER_READS = (1, 4, 8)
# Seeds between two rounds: more than the requests of a round, which have a seed each.
SEEDS = 1000

Texts = Sequence[tuple[int, ...]]


BatchRunner: TypeAlias = Runner[Texts, list[Reply]]
"""Completes all prompts, as many at once as it has slots."""


@dataclass(frozen=True, slots=True)
class ModeBatch:
    """One of our modes. Request n uses the sampling's seed plus n."""

    name: str
    client: Client
    slots: int

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        first = sampling.seed or 0
        requests = [TimedRequest(text, replace(sampling, seed=first + n), self.name) for n, text in enumerate(texts)]
        return list(send_all(self.client, requests, self.slots))


@dataclass(frozen=True, slots=True)
class PeerBatch:
    """A peer that completes a batch; `extra` are additional fields of its requests."""

    name: str
    process: PeerProcess
    extra: Mapping[str, int] = field(default_factory=dict)

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        answer = self.process.ask({
            "batch": [list(text) for text in texts],
            "max_tokens": sampling.max_tokens,
            "temp": sampling.temp,
            "seed": sampling.seed or 0,
            **self.extra,
        })  # fmt: skip
        return [Reply(r["sent"], tuple(Arrival(at, n) for at, n in r["arrivals"])) for r in answer["replies"]]


def best_mlx_lm(process: PeerProcess, slots: int, rounds: Sequence[Texts], sampling: SamplingParams) -> PeerBatch:
    """Returns mlx-lm's `BatchGenerator` with the prefill batch size that is fastest in a trial."""
    candidates = [
        PeerBatch(f"{MLX_LM}, prefill batch {reads}", process, {"slots": slots, "reads": reads})
        for reads in PEER_READS
        if reads <= slots
    ]
    trial = run_interleaved(candidates, rounds, sampling, lambda _: None, seeds=SEEDS)
    best = max(candidates, key=lambda runner: total_rate([timed(replies) for replies in trial[runner.name]]))
    return replace(best, name=MLX_LM)
