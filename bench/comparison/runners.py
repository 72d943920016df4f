"""Starts the runners of a bench, clusters of our modes and other engines, and stops them at its end.

A family is one decoding method with all its settings. A trial on a few prompts selects the best of each family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.bench.comparison.peers import (
    DRAFT_SPECULATIONS,
    LLAMA_CPP,
    MLX_LM,
    SPECULATIONS,
    ChosenPeers,
    llama_cpp,
    mlx_lm,
)
from outrider.bench.comparison.runs import (
    COLOCATED,
    ONE_PROCESS,
    PromptRunner,
    mode_runner,
    run_interleaved,
    target_stats,
    total_rate,
)
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine import system
from outrider.orchestrator.settings import DRAFT_WORKER_SETTINGS, ServeSettings
from outrider.protocol.sampling import SamplingParams


class RunnerFamilies:
    """All runners by family and name. `stack` ends their clusters and peers.

    `given` are the cluster's settings as keywords; `settings` the same with resolved folders (see `pairing`).
    `threads`: the target's, and those of all workers. `weight_bytes`: what the target reads in one forward. `notes`:
    those of all clusters, each once.

    Raises:
        OutriderError: a cluster or a peer can't be started.
    """

    weight_bytes = 0

    def __init__(
        self,
        stack: ExitStack,
        given: dict[str, Any],
        settings: ServeSettings,
        depths: Sequence[int],
        peers: ChosenPeers,
        progress: Callable[[str], None],
    ) -> None:
        self.families: list[dict[str, PromptRunner]] = []
        self.notes: dict[str, None] = {}
        self._stack, self._settings, self._depths, self._progress = stack, settings, depths, progress
        self.threads = system.threads_of("target", settings), system.all_threads(settings)
        self._add_modes(given)
        if peers.mlx_lm:
            self._add_mlx_lm()
        if peers.gguf is not None:
            self._add_llama_cpp(peers.gguf, peers.draft)
        if settings.can_colocate:  # SSD uses the drafter's core, too
            client = self._start_cluster({**given, "colocate": True, "threads": self.threads[1]})
            self.families.append({ONE_PROCESS: mode_runner(client, "auto")})

    def best(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, progress: Callable[[str], None]
    ) -> dict[str, PromptRunner]:
        """Returns the best of each family in a trial on prompts that are not measured later, because the best of many
        is partly luck."""
        runners = {name: runner for family in self.families for name, runner in family.items()}
        trial = run_interleaved(runners, prompts, sampling, progress)
        rates = {name: total_rate([run.timed for run in runs]) for name, runs in trial.items()}
        return {name: runners[name] for name in (max(family, key=rates.__getitem__) for family in self.families)}

    def _add_modes(self, given: dict[str, Any]) -> None:
        """Adds AR, SD with every draft source, SSD and auto.

        Without a draft model, n-grams are the only source, and SSD is omitted.
        """
        depths, drafts = self._depths, self._settings.draft_backend != "ngram"
        without_drafter = {k: v for k, v in given.items() if k not in DRAFT_WORKER_SETTINGS}
        without_drafter["threads"] = self.threads[0]
        client = ngrams = self._start_cluster(given)
        clients = {"n-gram": client}
        self.weight_bytes = target_stats(client).weight_bytes
        self.families.append({"ar": mode_runner(client, "ar")})
        if drafts:
            ngrams = self._start_cluster({**without_drafter, "draft_backend": "ngram", "ngrams": True})
            model = self._start_cluster({**given, "ngrams": False, "ngram_table": None})
            self.families.append({f"sd model K={k}": mode_runner(model, "sd", k) for k in depths})
            clients = {"n-gram": ngrams, "model + n-gram": client}
        self.families.append(
            {f"sd {name} K={k}": mode_runner(one, "sd", k) for k in depths for name, one in clients.items()}
        )
        self._pin(ngrams)
        if self._settings.can_colocate:
            together = self._start_cluster({**given, "colocate": True, "threads": self.threads[0]})
            self._pin(together)
            self.families.append({f"sd {COLOCATED} K={k}": mode_runner(together, "sd", k) for k in depths})
        if drafts:
            self.families.append({f"ssd K={k}": mode_runner(client, "ssd", k) for k in depths})
        self.families.append({"auto": mode_runner(client, "auto")})

    def _add_mlx_lm(self) -> None:
        process = self._stack.enter_context(mlx_lm(self._settings))
        self.families.append({MLX_LM: partial(process.run, num_draft_tokens=0)})
        if self._settings.draft_model is not None:
            self.families.append({f"{MLX_LM} sd K={n}": partial(process.run, num_draft_tokens=n) for n in self._depths})

    def _add_llama_cpp(self, gguf: Path, draft: Path | None) -> None:
        """Adds llama.cpp with our target's threads, and with those of all our workers without and with its own
        speculation."""
        for threads in dict.fromkeys(self.threads):
            process = self._stack.enter_context(llama_cpp(replace(self._settings, threads=threads), gguf))
            self.families.append({llama_cpp_name(threads): process.run})
        all_threads = replace(self._settings, threads=self.threads[1])
        self.families.append({})
        for speculation in (*SPECULATIONS, *(DRAFT_SPECULATIONS if draft is not None else ())):
            self._progress(f"{LLAMA_CPP} {speculation.name}")
            process = self._stack.enter_context(llama_cpp(all_threads, gguf, speculation=speculation, draft=draft))
            self.families[-1][llama_cpp_name(self.threads[1], speculation.name)] = process.run

    def _start_cluster(self, given: dict[str, Any]) -> Client:
        cluster = self._stack.enter_context(LocalCluster(progress=self._progress, **{"memory": False, **given}))
        self.notes |= dict.fromkeys(cluster.notes)
        return cluster.client()

    def _pin(self, client: Client) -> None:
        """Pins a target without a drafter, which its cluster does not pin, to the core that all other targets use."""
        pin_process(target_stats(client).pid, system.core_of("target", self._settings))


def pin_process(pid: int, core: int | None) -> None:
    """Pins all threads of a running process."""
    threads = Path(f"/proc/{pid}/task")
    for thread in threads.iterdir() if core is not None and threads.is_dir() else ():
        system.pin_to_core(int(thread.name), core)


def llama_cpp_name(threads: int, speculation: str = "") -> str:
    suffix = f" {speculation}" if speculation else ""
    return f"{LLAMA_CPP}{suffix}, {threads} thread{'s' * (threads > 1)}"
