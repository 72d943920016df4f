"""Runs the same prompts through every contestant, in turns, so that a drifting machine drifts for all alike.

A contestant is a way to generate: one of our modes at its K, or mlx-lm's own loops on the same weights. Speeds are of
decoding: from the first generated token to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from outrider.bench.contest.statistics import Timed
from outrider.bench.helper import Helper
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.result import GenerationResult
from outrider.orchestrator.machine import cores
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Timings
from outrider.protocol.profile import NOT_KEPT
from outrider.protocol.sampling import SamplingParams

W = TypeVar("W")

# In the name of a contestant whose draft lives in the target's process.
COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt through one contestant. `timings` are ours alone; mlx-lm tells none."""

    tokens: tuple[int, ...]
    timed: Timed
    timings: Timings | None = None


class Contestant(Protocol):
    """A way to generate; `name` is what tables call it."""

    @property
    def name(self) -> str: ...

    def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Run: ...


@dataclass(frozen=True, slots=True)
class Ours:
    """One of our modes on a running cluster; `depth` None: the cluster's own K."""

    name: str
    client: Client
    mode: str
    depth: int | None = None
    branches: int | None = None

    def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Run:
        result = self.client.generate(
            prompt, sampling, mode=self.mode, num_draft_tokens=self.depth, branches=self.branches
        )
        require_pace(result)
        times = result.timings
        return Run(result.token_ids, Timed(len(result.token_ids) - 1, times.predicted_ms / 1000), times)


def require_pace(result: GenerationResult) -> None:
    """
    Raises:
        WorkerError: a worker could not keep to its latency profile, so nothing can be said of the profile's machine.
    """
    for note in result.notes:
        if NOT_KEPT in note:
            raise WorkerError(f"the simulation failed: {note}")


class PeerProcess(Helper):
    """mlx-lm in a process of its own, with the same BLAS, threads and core as our target."""

    def __init__(self, settings: ServeSettings) -> None:
        """`settings` must name folders (see `pairing`)."""
        draft = ["--draft-model", settings.draft_model] if settings.draft_model is not None else []
        command = ("outrider.bench.contest.peers", "--model", str(settings.model), *draft)
        super().__init__(*command, threads=settings.threads)
        cores.pin(self.pid, cores.core_of("target", settings))

    def run(self, prompt: Sequence[int], sampling: SamplingParams, depth: int) -> Run:
        told = self.ask({
            "tokens": list(prompt),
            "max_tokens": sampling.max_tokens,
            "num_draft_tokens": depth,
            "temp": sampling.temp,
            "seed": sampling.seed or 0,
        })  # fmt: skip
        return Run(tuple(told["tokens"]), Timed(len(told["tokens"]) - 1, told["decode_seconds"]))


@dataclass(frozen=True, slots=True)
class Peer:
    """mlx-lm's plain decoding (`depth` 0) or its speculative decoding."""

    name: str
    process: PeerProcess
    depth: int = 0

    def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Run:
        return self.process.run(prompt, sampling, self.depth)


def compete(
    contestants: Sequence[Contestant],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    tell: Callable[[str], None],
    between: Callable[[Sequence[int], SamplingParams], None] | None = None,
) -> dict[str, list[Run]]:
    """Every contestant on every prompt, whoever begins changing from prompt to prompt. By name, in prompt order.

    `between` is called once a prompt, while all contestants are still.
    """
    runs: dict[str, list[Run]] = {contestant.name: [] for contestant in contestants}
    for number, prompt in enumerate(prompts):
        chosen = replace(sampling, seed=number)
        for contestant in rotated(contestants, number):
            tell(f"prompt {number + 1} of {len(prompts)}: {contestant.name}")
            runs[contestant.name].append(contestant.run(prompt, chosen))
        if between is not None:
            tell(f"prompt {number + 1} of {len(prompts)}: times alone")
            between(prompt, chosen)
    return runs


def rotated(ways: Sequence[W], by: int) -> Iterator[W]:
    """All of them, another one first each time."""
    for index in range(len(ways)):
        yield ways[(index + by) % len(ways)]
