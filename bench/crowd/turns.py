"""Several requests at once by every way, the ways in turns: one round after the other, so that a drifting machine
drifts for all alike. A way is one of our modes, or mlx-lm's batch of the same prompts on the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.bench.contest.contest import PeerProcess, rotated
from outrider.bench.contest.statistics import total_rate
from outrider.bench.crowd.ask import Question, ask_all
from outrider.bench.crowd.reply import Arrival, Reply, timed
from outrider.orchestrator.client.client import Client
from outrider.protocol.sampling import SamplingParams

PEER = "mlx-lm"
# How many prompts mlx-lm may read in one forward: 8 is its own default; which is fastest here is tried.
PEER_READS = (1, 4, 8)

Texts = Sequence[tuple[int, ...]]


class Batcher(Protocol):
    """Answers all of these prompts, so many at once as it has places; `name` is what tables call it."""

    @property
    def name(self) -> str: ...

    def run(self, texts: Texts, sampling: SamplingParams) -> list[Reply]: ...


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
    found = in_turns(tried, rounds, sampling, lambda _: None)
    rates = {way.reads: total_rate([timed(replies) for replies in found[way.name]]) for way in tried}
    return PeerBatch(process, places, max(rates, key=rates.__getitem__))


def in_turns(
    ways: Sequence[Batcher], rounds: Sequence[Texts], sampling: SamplingParams, tell: Callable[[str], None]
) -> Mapping[str, list[list[Reply]]]:
    """By name, the replies of each round; who begins changes from round to round."""
    found: dict[str, list[list[Reply]]] = {way.name: [] for way in ways}
    for number, texts in enumerate(rounds):
        chosen = replace(sampling, seed=1000 * number)
        for way in rotated(ways, number):
            tell(f"{len(texts)} requests, round {number + 1} of {len(rounds)}: {way.name}")
            found[way.name].append(way.run(texts, chosen))
    return found
