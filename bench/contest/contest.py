"""Runs the same prompts through every contestant, in turns, so that a drifting machine drifts for all alike.

A contestant is a way to generate: one of our modes at its K, or another engine on the same weights (`peers`). Speeds
are of decoding: from the first generated token to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias, TypeVar

from outrider.bench.contest.statistics import Timed
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.result import GenerationResult
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Timings
from outrider.protocol.profile import NOT_KEPT
from outrider.protocol.sampling import SamplingParams

T = TypeVar("T", contravariant=True)
R = TypeVar("R", covariant=True)

# In the name of a contestant whose draft lives in the target's process.
COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt through one contestant. `timings` are ours alone; other engines tell none."""

    tokens: tuple[int, ...]
    timed: Timed
    timings: Timings | None = None


class Way(Protocol[T, R]):
    """A way to make something of each task; `name` is what tables call it."""

    @property
    def name(self) -> str: ...

    def run(self, task: T, sampling: SamplingParams, /) -> R: ...


Contestant: TypeAlias = Way[Sequence[int], Run]
"""A way to go on from a prompt."""


@dataclass(frozen=True, slots=True)
class Ours:
    """One of our modes on a running cluster; `depth` None: the cluster's own K. `sampling`: what it samples otherwise
    than the others. `drafter`: the only one that drafts, if named."""

    name: str
    client: Client
    mode: str
    depth: int | None = None
    branches: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    drafter: str = ""

    def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Run:
        own = replace(sampling, **self.sampling)
        result = self.client.generate(
            prompt,
            own,
            mode=self.mode,
            num_draft_tokens=self.depth,
            branches=self.branches,
            drafter=self.drafter,
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


def compete(
    ways: Sequence[Way[T, R]],
    tasks: Sequence[T],
    sampling: SamplingParams,
    tell: Callable[[str], None],
    between: Callable[[T, SamplingParams], None] | None = None,
    seeds: int = 1,
) -> dict[str, list[R]]:
    """Every way on every task, whoever begins changing from task to task. By name, in the tasks' order.

    A task has so many `seeds` of its own, of which the sampling names the first. `between` is called once a task, while
    all ways are still.
    """
    runs: dict[str, list[R]] = {way.name: [] for way in ways}
    for number, task in enumerate(tasks):
        chosen, first = replace(sampling, seed=seeds * number), number % len(ways)
        for way in (*ways[first:], *ways[:first]):
            tell(f"{number + 1} of {len(tasks)}: {way.name}")
            runs[way.name].append(way.run(task, chosen))
        if between is not None:
            tell(f"{number + 1} of {len(tasks)}: times alone")
            between(task, chosen)
    return runs
