"""Ways to answer several requests at once: our modes, or a peer's batch of the same prompts on the same weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from outrider.bench.contest.contest import Way, compete
from outrider.bench.contest.peers import MLX_LM, PeerProcess
from outrider.bench.contest.statistics import total_rate
from outrider.bench.crowd.ask import Question, ask_all
from outrider.bench.crowd.reply import Arrival, Reply, timed
from outrider.orchestrator.client.client import Client
from outrider.protocol.sampling import SamplingParams

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
    found = compete(tried, rounds, sampling, lambda _: None, seeds=SEEDS)
    best = max(tried, key=lambda way: total_rate([timed(replies) for replies in found[way.name]]))
    return replace(best, name=MLX_LM)
