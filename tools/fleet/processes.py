"""Engines on simulated devices: real servers, targets and drafters on this machine, with forwards that sleep.

The target is a small stand-in; the drafter replays its texts with the profile's acceptance (docs/simulation.md).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.sampling import SamplingParams
from tools.latency import Latency
from tools.simulation.environment import simulated_machine
from tools.simulation.profile import Profile
from tools.simulation.script import random_prompts, write_model_and_script


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """A request for `tokens` tokens after a prompt, to be sent `after` seconds."""

    prompt: tuple[int, ...]
    tokens: int
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class CompletedRequest:
    """The times of a request, in seconds: when it was sent, its first token and its end; and its tokens."""

    sent: float
    first: float
    ended: float
    tokens: int


class Engines:
    """Runs `count` servers with the times of `profile` until `close`."""

    def __init__(self, profile: Profile, count: int, longest: int, texts: int, active: int) -> None:
        self._stack = ExitStack()
        try:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="outrider-")))
            self.prompts, machine = random_prompts(texts), self._folder / "profile.json"
            longest_text = SamplingParams(max_tokens=longest, ignore_eos=True)
            script = write_model_and_script(self._folder, self.prompts, longest_text)
            machine.write_text(json.dumps(_profile_json(profile)))
            self._stack.enter_context(simulated_machine(machine, script))
            self._clusters = [self._stack.enter_context(self._cluster(active)) for _ in range(count)]
        except BaseException:
            self.close()
            raise

    @property
    def clients(self) -> list[AsyncClient]:
        """A new client for each server."""
        return [AsyncClient(cluster.endpoint, timeout=60.0) for cluster in self._clusters]

    def cpu_seconds(self) -> float:
        """Returns the CPU time that all processes of the servers have used."""
        seconds = 0.0
        for cluster in self._clusters:
            server = psutil.Process(cluster.pid)
            for process in (server, *server.children(recursive=True)):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds

    def close(self) -> None:
        self._stack.close()

    def _cluster(self, active: int) -> LocalCluster:
        return LocalCluster(
            model=self._folder, draft_model=self._folder, ngrams=False, memory=False, max_active=active,
            prompt_cache=False,
        )  # fmt: skip


def slow_down(profile: Profile, times: float) -> Profile:
    """Returns a profile with all times multiplied, so that this machine can simulate several such engines."""

    def slower(latency: Latency) -> Latency:
        return Latency(tuple((rows, ms * times) for rows, ms in latency.points))

    return replace(profile, target=slower(profile.target), draft=slower(profile.draft), link_ms=profile.link_ms * times)


async def send(client: AsyncClient, request: PlannedRequest, mode: str = "auto") -> CompletedRequest:
    """Sends a request, and returns its times when it is complete."""
    sent, first, tokens = time.perf_counter(), 0.0, 0
    stream = client.stream(request.prompt, SamplingParams(max_tokens=request.tokens, ignore_eos=True), mode=mode)
    async for chunk in stream:
        first = first or time.perf_counter()
        tokens += len(chunk.token_ids)
    return CompletedRequest(sent, first, time.perf_counter(), tokens)


@contextmanager
def measure_cpu_share() -> Iterator[list[float]]:
    """Yields a list that receives, at the end of the block, the share of all cores in use by any process."""
    share: list[float] = []
    psutil.cpu_percent()
    yield share
    share.append(psutil.cpu_percent() / 100)


def _profile_json(profile: Profile) -> dict[str, object]:
    def points(latency: Latency) -> dict[str, float]:
        return {str(rows): ms for rows, ms in latency.points}

    return {
        "name": profile.name, "sources": list(profile.sources), "target_ms": points(profile.target),
        "draft_ms": points(profile.draft), "link_ms": profile.link_ms, "acceptance": list(profile.acceptance),
        "bonus_ranks": list(profile.bonus_ranks),
    }  # fmt: skip


def total_rate(completed: Sequence[CompletedRequest]) -> float:
    """Returns the tokens per second of all requests together, from the first sending to the last end."""
    seconds = max(request.ended for request in completed) - min(request.sent for request in completed)
    return sum(request.tokens for request in completed) / seconds
