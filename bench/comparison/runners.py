"""Starts the runners of a bench, clusters of our modes and other engines, and stops them at its end.

A family is one decoding method with all its settings. A trial on a few prompts selects the best of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
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

Tell = Callable[[str], None]


def start_runners(
    stack: ExitStack,
    given: dict[str, Any],
    settings: ServeSettings,
    depths: Sequence[int],
    both_cores: bool,
    peers: ChosenPeers,
    tell: Tell,
    one_process: bool = False,
) -> RunnerFamilies:
    """Starts all runners, which `stack` ends. `one_process` adds `auto` with both models in one process on both cores.

    `given` are the cluster's settings as keywords; `settings` the same with resolved folders (see `pairing`).

    Raises:
        OutriderError: a cluster or a peer can't be started.
    """
    found = RunnerFamilies(stack, settings, depths, tell)
    found.add_ours("", given)
    if peers.mlx_lm:
        found.add_mlx_lm("", settings)
    if peers.gguf is not None:
        found.add_llama_cpp(peers.gguf, peers.draft)
    # SSD uses one core per worker; here the other runners get as many.
    threads = 2 * settings.threads
    if one_process and settings.can_colocate:
        client = found.cluster({**given, "colocate": True, "threads": threads}).client()
        found.families.append([ModeRunner(ONE_PROCESS, client, "auto")])
    if both_cores:
        found.add_ours(BOTH_CORES, {**given, "threads": threads}, plain=True)
        if peers.mlx_lm:
            found.add_mlx_lm(BOTH_CORES, replace(settings, threads=threads))
    return found


class RunnerFamilies:
    """All runners by family. `stack` ends their clusters and peers. `weight_bytes`: what the target reads in one
    forward."""

    weight_bytes = 0

    def __init__(self, stack: ExitStack, settings: ServeSettings, depths: Sequence[int], tell: Tell) -> None:
        self.families: list[list[PromptRunner]] = []
        self._stack, self._settings, self._depths, self._tell = stack, settings, depths, tell

    def best(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, tell: Tell) -> list[PromptRunner]:
        """Returns the best of each family in a trial on prompts that are not measured later, because the best of many
        is partly luck."""
        trial = run_interleaved([runner for family in self.families for runner in family], prompts, sampling, tell)
        rates = {name: total_rate([run.timed for run in runs]) for name, runs in trial.items()}
        return [max(family, key=lambda runner: rates[runner.name]) for family in self.families]

    def add_ours(self, suffix: str, given: dict[str, Any], plain: bool = False) -> None:
        """Adds AR, SD with every draft source and, unless `plain`, SSD and auto.

        Without a draft model, n-grams are the only source, and SSD is omitted.
        """
        depths, drafts = self._depths, self._settings.draft_backend != "ngram"
        without_drafter = {k: v for k, v in given.items() if k not in ("draft_model", "draft_backend", "replay")}
        client = ngrams = self.cluster(given).client()
        clients = {"n-gram": client}
        self.weight_bytes = _target(client).weight_bytes
        self.families.append([ModeRunner(BASELINE + suffix, client, "ar")])
        if drafts:
            ngrams = self.cluster({**without_drafter, "draft_backend": "ngram", "ngrams": True}).client()
            model = self.cluster({**given, "ngrams": False}).client()
            self.families.append([ModeRunner(f"sd model K={k}{suffix}", model, "sd", k) for k in depths])
            clients = {"n-gram": ngrams, "both": client}
        self.families.append(
            [ModeRunner(f"sd {name} K={k}{suffix}", one, "sd", k) for k in depths for name, one in clients.items()]
        )
        if plain:
            return
        self._pin(ngrams)
        if self._settings.can_colocate:
            together = self.cluster({**given, "colocate": True}).client()
            self._pin(together)
            self.families.append([ModeRunner(f"sd {COLOCATED} K={k}", together, "sd", k) for k in depths])
        if drafts:
            self.families.append([ModeRunner(f"ssd K={k}", client, "ssd", k) for k in depths])
        self.families.append([ModeRunner("auto", client, "auto")])

    def add_mlx_lm(self, suffix: str, settings: ServeSettings) -> None:
        process = self._stack.enter_context(mlx_lm(settings))
        self.families.append([PeerRunner(f"{MLX_LM}{suffix}", process, {"num_draft_tokens": 0})])
        if settings.draft_model is not None:
            names = {f"{MLX_LM} sd K={n}{suffix}": {"num_draft_tokens": n} for n in self._depths}
            self.families.append([PeerRunner(name, process, extra) for name, extra in names.items()])

    def add_llama_cpp(self, gguf: Path, draft: Path | None) -> None:
        """Adds llama.cpp with our target's threads, and with twice as many without and with its own speculation."""
        twice = replace(self._settings, threads=2 * self._settings.threads)
        for settings in (self._settings, twice):
            process = self._stack.enter_context(llama_cpp(settings, gguf))
            self.families.append([PeerRunner(llama_name(settings.threads), process)])
        self.families.append([])
        for speculation in (*SPECULATIONS, *(WITH_DRAFT if draft is not None else ())):
            self._tell(f"{LLAMA_CPP} {speculation.name}")
            process = self._stack.enter_context(llama_cpp(twice, gguf, speculation=speculation, draft=draft))
            self.families[-1].append(PeerRunner(llama_name(twice.threads, speculation.name), process))

    def cluster(self, given: dict[str, Any]) -> LocalCluster:
        return self._stack.enter_context(LocalCluster(progress=self._tell, **{"memory": False, **given}))

    def _pin(self, client: Client) -> None:
        """Pins a target without a drafter, which would not be pinned: all targets use the same core here."""
        pin_process(_target(client).pid, system.core_of("target", self._settings))


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
