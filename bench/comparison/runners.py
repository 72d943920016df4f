"""Starts the runners of a bench, clusters of our modes and other engines, and stops them at its end.

A family is one decoding method with all its settings. A trial on a few prompts selects the best of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.bench.comparison.peers import (
    LLAMA_CPP,
    MLX_LM,
    SPECULATIONS,
    WITH_DRAFT,
    ChosenPeers,
    PeerRunner,
    llama_cpp,
    mlx_lm,
)
from outrider.bench.comparison.runs import (
    COLOCATED,
    ONE_PROCESS,
    ModeRunner,
    PromptRunner,
    Run,
    run_interleaved,
    total_rate,
)
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine import system
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.messages import WorkerStats
from outrider.protocol.sampling import SamplingParams

BASELINE = "ar"
# Suffix of a runner that uses both cores.
BOTH_CORES = ", both cores"
# Prompts of the trial, and the fewest for a class with few prompts.
TRIAL_PROMPTS = 4
FEWEST_TRIAL_PROMPTS = 2

Families = list[list[PromptRunner]]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunnerFamilies:
    """All runners by family. `weight_bytes`: what the target reads in one forward."""

    families: Families
    weight_bytes: int

    def best(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, tell: Tell) -> list[PromptRunner]:
        """Returns the best of each family in a trial on prompts that are not measured later, because the best of many
        is partly luck. SD with only the model is always kept, because the formula describes it."""
        trial = run_interleaved([runner for family in self.families for runner in family], prompts, sampling, tell)
        rates = {name: total_rate([run.timed for run in runs]) for name, runs in trial.items()}
        chosen: dict[str, PromptRunner] = {}
        for family in self.families:
            models = [runner for runner in family if runner.name.startswith("sd model")]
            for candidates in (family, models):
                if candidates:
                    best = max(candidates, key=lambda runner: rates[runner.name])
                    chosen.setdefault(best.name, best)
        return list(chosen.values())


@contextmanager
def start_runners(
    given: dict[str, Any],
    settings: ServeSettings,
    depths: Sequence[int],
    both_cores: bool,
    peers: ChosenPeers,
    tell: Tell,
    one_process: bool = False,
) -> Iterator[RunnerFamilies]:
    """Starts all runners. `one_process` adds `auto` with both models in one process on both cores.

    `given` are the cluster's settings as keywords; `settings` the same with resolved folders (see `pairing`).

    Raises:
        OutriderError: a cluster or a peer can't be started.
    """
    with ExitStack() as stack:
        start = _Starter(stack, settings, depths, tell)
        families, weight_bytes = start.ours("", given)
        if peers.mlx_lm:
            families += start.mlx_lm("", settings)
        families += start.llama_cpp(peers)
        # SSD uses one core per worker; here the other runners get as many.
        threads = 2 * settings.threads
        if one_process and settings.can_colocate:
            client = start.cluster({**given, "colocate": True, "threads": threads}).client()
            families.append([ModeRunner(ONE_PROCESS, client, "auto")])
        if both_cores:
            families += start.ours(BOTH_CORES, {**given, "threads": threads}, plain=True)[0]
            if peers.mlx_lm:
                families += start.mlx_lm(BOTH_CORES, replace(settings, threads=threads))
        yield RunnerFamilies(families, weight_bytes)


@dataclass(frozen=True, slots=True)
class _Starter:
    """Starts clusters and peers, which `stack` ends."""

    stack: ExitStack
    settings: ServeSettings
    depths: Sequence[int]
    tell: Tell

    def ours(self, suffix: str, given: dict[str, Any], plain: bool = False) -> tuple[Families, int]:
        """Returns AR, SD with every draft source and, unless `plain`, SSD and auto; and the bytes of the target's
        weights.

        Without a draft model, n-grams are the only source, and SSD is omitted.
        """
        without_drafter = {k: v for k, v in given.items() if k not in ("draft_model", "draft_backend", "replay")}
        cluster, drafts = self.cluster(given), self.settings.draft_backend != "ngram"
        ngrams = self.cluster({**without_drafter, "draft_backend": "ngram", "ngrams": True}) if drafts else cluster
        if not plain:
            # A target without a drafter would not be pinned; all targets use the same core here.
            pin_process(_target(ngrams.client()).pid, system.core_of("target", self.settings))
        clients = {"n-gram": ngrams.client()}
        if drafts:
            clients = {"model": self.cluster({**given, "ngrams": False}).client(), **clients, "both": cluster.client()}
        families: Families = [
            [ModeRunner(BASELINE + suffix, cluster.client(), "ar")],
            [
                ModeRunner(f"sd {source} K={depth}{suffix}", client, "sd", depth)
                for depth in self.depths
                for source, client in clients.items()
            ],
        ]
        if not plain:
            if self.settings.can_colocate:
                client = self.cluster({**given, "colocate": True}).client()
                pin_process(_target(client).pid, system.core_of("target", self.settings))
                families.append([ModeRunner(f"sd {COLOCATED} K={k}", client, "sd", k) for k in self.depths])
            if drafts:
                families.append([ModeRunner(f"ssd K={depth}", cluster.client(), "ssd", depth) for depth in self.depths])
            families.append([ModeRunner("auto", cluster.client(), "auto")])
        return families, _target(cluster.client()).weight_bytes

    def mlx_lm(self, suffix: str, settings: ServeSettings) -> Families:
        process = self.stack.enter_context(mlx_lm(settings))
        families: Families = [[PeerRunner(f"{MLX_LM}{suffix}", process, {"num_draft_tokens": 0})]]
        if settings.draft_model is not None:
            families.append(
                [PeerRunner(f"{MLX_LM} sd K={n}{suffix}", process, {"num_draft_tokens": n}) for n in self.depths]
            )
        return families

    def llama_cpp(self, peers: ChosenPeers) -> Families:
        """Returns llama.cpp with our target's threads, and with twice as many without and with its own speculation."""
        if peers.gguf is None:
            return []
        twice = replace(self.settings, threads=2 * self.settings.threads)
        families: Families = []
        for settings in (self.settings, twice):
            process = self.stack.enter_context(llama_cpp(settings, peers.gguf))
            families.append([PeerRunner(llama_name(settings.threads), process)])
        speculative: list[PromptRunner] = []
        for speculation in (*SPECULATIONS, *(WITH_DRAFT if peers.draft is not None else ())):
            self.tell(f"{LLAMA_CPP} {speculation.name}")
            process = self.stack.enter_context(llama_cpp(twice, peers.gguf, speculation=speculation, draft=peers.draft))
            speculative.append(PeerRunner(llama_name(twice.threads, speculation.name), process))
        return [*families, speculative]

    def cluster(self, given: dict[str, Any]) -> LocalCluster:
        return self.stack.enter_context(LocalCluster(progress=self.tell, **{"memory": False, **given}))


def _target(client: Client) -> WorkerStats:
    return next(worker for worker in client.stats().workers if worker.role == "target")


def pin_process(pid: int, core: int | None) -> None:
    """Pins all threads of a running process."""
    threads = Path(f"/proc/{pid}/task")
    for thread in threads.iterdir() if core is not None and threads.is_dir() else ():
        system.pin(int(thread.name), core)


def llama_name(threads: int, speculation: str = "") -> str:
    suffix = f" {speculation}" if speculation else ""
    return f"{LLAMA_CPP}{suffix}, {threads} thread{'s' * (threads > 1)}"


def main_table_runs(runs: dict[str, list[Run]]) -> dict[str, list[Run]]:
    return {name: found for name, found in runs.items() if not name.endswith(BOTH_CORES)}


def second_table_runs(runs: dict[str, list[Run]]) -> dict[str, list[Run]]:
    """Returns the runs with both cores, including those of SSD and auto, which always use both."""
    return {
        name: found for name, found in runs.items() if name.endswith(BOTH_CORES) or name.startswith(("ssd", "auto"))
    }
