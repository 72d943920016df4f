"""Runs the same prompts through every contestant, in turns, so that a drifting machine drifts for all alike.

A contestant is a way to generate: one of our modes at its K, or mlx-lm's own loops on the same weights. Speeds are of
decoding: from the first generated token to the last.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from outrider.orchestrator.client.client import Client
from outrider.orchestrator.machine import blas, cores
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import ServeSettings
from outrider.orchestrator.study.statistics import Timed
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Timings
from outrider.protocol.sampling import SamplingParams

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
        times = result.timings
        return Run(result.token_ids, Timed(len(result.token_ids) - 1, times.predicted_ms / 1000), times)


class PeerProcess:
    """mlx-lm in a process of its own, with the same BLAS, threads and core as our target. A context manager."""

    def __init__(self, settings: ServeSettings) -> None:
        """`settings` must name folders (see `pairing`)."""
        command = python("-m", "outrider.target_worker.peers", "--model", str(settings.model))
        draft = ["--draft-model", settings.draft_model] if settings.draft_model is not None else []
        self._process = subprocess.Popen(
            [*command, *draft],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=blas.environment(child_environment(), settings.threads),
            text=True,
        )
        cores.pin(self._process.pid, cores.core_of("target", settings))

    def __enter__(self) -> PeerProcess:
        self._read()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, prompt: Sequence[int], sampling: SamplingParams, depth: int) -> Run:
        if self._process.stdin is None:
            raise WorkerError("the peer process has no input")
        wish = {
            "tokens": list(prompt),
            "max_tokens": sampling.max_tokens,
            "num_draft_tokens": depth,
            "temp": sampling.temp,
            "seed": sampling.seed or 0,
        }
        self._process.stdin.write(json.dumps(wish) + "\n")
        self._process.stdin.flush()
        told = self._read()
        return Run(tuple(told["tokens"]), Timed(len(told["tokens"]) - 1, told["decode_seconds"]))

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise WorkerError("the mlx-lm process ended; is mlx-lm installed? its message stands above")
        told: dict[str, Any] = json.loads(line)
        return told


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
        for contestant in _rotated(contestants, number):
            tell(f"prompt {number + 1} of {len(prompts)}: {contestant.name}")
            runs[contestant.name].append(contestant.run(prompt, chosen))
        if between is not None:
            tell(f"prompt {number + 1} of {len(prompts)}: times alone")
            between(prompt, chosen)
    return runs


def _rotated(contestants: Sequence[Contestant], by: int) -> Iterator[Contestant]:
    for index in range(len(contestants)):
        yield contestants[(index + by) % len(contestants)]


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file whose entries are separated by a line with one `%`."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n%\n")
