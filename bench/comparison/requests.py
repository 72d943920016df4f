"""Sends concurrent requests, as clients do, and records when each chunk arrives.

A gap is the time between two chunks; a token's time is the gap before its chunk divided by the chunk's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from outrider.bench.comparison.peers import MLX_LM, PeerProcess
from outrider.bench.comparison.runs import Runner, Timed, run_interleaved, total_rate
from outrider.orchestrator.client.client import Client
from outrider.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
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


def timed(replies: Sequence[Reply]) -> Timed:
    """Returns all tokens of concurrent requests, and the seconds from the first sending to the last end."""
    tokens = sum(arrival.tokens for reply in replies for arrival in reply.arrivals)
    return Timed(tokens, max(reply.ended for reply in replies) - min(reply.sent for reply in replies))


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
        samplings = [replace(sampling, seed=first + n) for n in range(len(texts))]
        with ThreadPoolExecutor(self.slots) as threads:
            return list(threads.map(self._send, texts, samplings))

    def _send(self, text: tuple[int, ...], sampling: SamplingParams) -> Reply:
        sent = time.perf_counter()
        chunks = self.client.stream(text, sampling, mode=self.name)
        return Reply(sent, tuple(Arrival(time.perf_counter(), len(c.token_ids)) for c in chunks if c.token_ids))


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
