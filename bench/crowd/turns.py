"""Ways to answer several requests at once: our modes, or mlx-lm's batch of the same prompts on the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from outrider.bench.contest.contest import PeerProcess, Way, compete
from outrider.bench.contest.statistics import total_rate
from outrider.bench.crowd.ask import Question, ask_all
from outrider.bench.crowd.reply import Arrival, Reply, timed
from outrider.orchestrator.client.client import Client
from outrider.protocol.sampling import SamplingParams

PEER = "mlx-lm"
# How many prompts mlx-lm may read in one forward: 8 is its own default; which is fastest here is tried.
PEER_READS = (1, 4, 8)
# More than there are requests in a round; each has its own.
SEEDS = 1000

Texts = Sequence[tuple[int, ...]]


Batcher: TypeAlias = Way[Texts, list[Reply]]
"""Answers all of these prompts, so many at once as it has places."""


@dataclass(frozen=True, slots=True)
class ModeBatch:
    """One of ours; each request has a seed of its own, counted from the sampling's."""

    name: str
    client: Client
    places: int

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        first = sampling.seed or 0
        questions = [Question(text, replace(sampling, seed=first + n), self.name) for n, text in enumerate(texts)]
        return list(ask_all(self.client, questions, self.places))


@dataclass(frozen=True, slots=True)
class PeerBatch:
    """mlx-lm's `BatchGenerator`, which `batch_generate` runs; it tells when each of its steps was there."""

    process: PeerProcess
    places: int
    reads: int
    name: str = PEER

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]:
        told = self.process.ask({
            "batch": [list(text) for text in texts],
            "max_tokens": sampling.max_tokens,
            "temp": sampling.temp,
            "seed": sampling.seed or 0,
            "places": self.places,
            "reads": self.reads,
        })  # fmt: skip
        arrivals = told["arrivals"]
        # Whoever finds no place at first is asked for when one is free, in their order.
        sent = [0.0] * self.places + sorted(times[-1] for times in arrivals)
        return [Reply(at, tuple(Arrival(t, 1) for t in times)) for at, times in zip(sent, arrivals, strict=False)]


def best_peer(process: PeerProcess, places: int, rounds: Sequence[Texts], sampling: SamplingParams) -> PeerBatch:
    """mlx-lm at its best setting on prompts that count nowhere else."""
    tried = [
        PeerBatch(process, places, reads, f"{PEER}, {reads} read together") for reads in PEER_READS if reads <= places
    ]
    found = compete(tried, rounds, sampling, lambda _: None, seeds=SEEDS)
    rates = {way.reads: total_rate([timed(replies) for replies in found[way.name]]) for way in tried}
    return PeerBatch(process, places, max(rates, key=rates.__getitem__))
