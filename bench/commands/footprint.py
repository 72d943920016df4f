"""The footprint of a server for `outrider bench`, and of llama.cpp on the same file.

Memory of all processes (PSS, or RSS where the system has no PSS), time to first token of a long prompt, and start-up
time.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import psutil

from outrider.bench.comparison.peers import ChosenPeers, llama_cpp
from outrider.bench.comparison.runners import llama_cpp_name
from outrider.bench.comparison.runs import SEED_STRIDE, BatchRunner, Texts, mode_batch_runner, run_interleaved
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine import system
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.sampling import SamplingParams

OUTRIDER_MODE = "auto"
MEMORY_REQUESTS, MEMORY_TEXT_TOKENS, MEMORY_NEW_TOKENS = 4, 2048, 128
"""The concurrent requests with which memory is measured, the tokens of each, and how many of them are generated."""
LATENCY_PROMPT_TOKENS, LATENCY_ROUNDS = 1024, 6
START_REPEATS = 3
SAMPLING_SECONDS = 0.2
MEBIBYTE = 1 << 20
TWO_TOKENS = SamplingParams(max_tokens=2, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory and latencies. By engine name: `memory`, the peak of all processes in bytes; `first_ms`, the median time
    to first token of a long prompt.

    `start_s`: the median seconds from Outrider's launch until it is ready, with files in the page cache.
    """

    memory: dict[str, int]
    first_ms: dict[str, float]
    start_s: float


def measure_footprint(
    given: dict[str, Any],
    settings: ServeSettings,
    peers: ChosenPeers,
    words: Sequence[int],
    progress: Callable[[str], None],
) -> Footprint:
    """Measures the footprint. `given` are the cluster's settings as keywords; prompts are cut from the tokens `words`.

    Raises:
        OutriderError: a cluster or a peer can't be started.
    """
    given = {"progress": progress, **given, "memory": False}
    target_threads = system.threads_of("target", settings)
    starts = []
    for _ in range(START_REPEATS):
        begun = time.perf_counter()
        with LocalCluster(**given):
            starts.append(time.perf_counter() - begun)

    progress(f"memory of {MEMORY_REQUESTS} concurrent requests")
    texts = _cut_prompts(words, MEMORY_REQUESTS, MEMORY_TEXT_TOKENS - MEMORY_NEW_TOKENS)
    sampling = SamplingParams(max_tokens=MEMORY_NEW_TOKENS, ignore_eos=True, seed=0)
    with LocalCluster(**{"max_active": MEMORY_REQUESTS, **given}) as cluster:
        ours = mode_batch_runner(cluster.client(), OUTRIDER_MODE, MEMORY_REQUESTS)
        memory = {OUTRIDER_MODE: peak_memory(cluster.pid, lambda: ours(texts, sampling))}
    if peers.gguf is not None:
        with llama_cpp(settings, peers.gguf, slots=MEMORY_REQUESTS) as process:
            memory[llama_cpp_name(target_threads)] = peak_memory(
                process.pid, lambda: process.run_batch(texts, sampling)
            )

    with ExitStack() as stack:
        client = stack.enter_context(LocalCluster(**given)).client()
        runners: dict[str, BatchRunner] = {OUTRIDER_MODE: mode_batch_runner(client, OUTRIDER_MODE, 1)}
        if peers.gguf is not None:
            for threads in dict.fromkeys((target_threads, system.all_threads(settings))):
                process = stack.enter_context(llama_cpp(replace(settings, threads=threads), peers.gguf))
                runners[llama_cpp_name(threads)] = process.run_batch
        prompts: list[Texts] = [[prompt] for prompt in _cut_prompts(words, LATENCY_ROUNDS + 1, LATENCY_PROMPT_TOKENS)]
        runs = run_interleaved(
            runners, prompts, TWO_TOKENS, lambda message: progress(f"first token, {message}"), seeds=SEED_STRIDE
        )
    first_ms = {name: statistics.median(round_[0].first_ms for round_ in of[1:]) for name, of in runs.items()}
    return Footprint(memory, first_ms, statistics.median(starts))


def footprint_lines(found: Footprint) -> list[str]:
    memory = ", ".join(f"{name} {size / MEBIBYTE:.0f} MiB" for name, size in found.memory.items())
    first = ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.first_ms.items())
    return [
        f"- memory of all processes, {MEMORY_REQUESTS} concurrent requests of {MEMORY_TEXT_TOKENS} tokens: {memory}",
        f"- time to first token of a prompt of {LATENCY_PROMPT_TOKENS} tokens: {first}",
        f"- start-up {found.start_s:.1f} s",
    ]


def total_memory(pid: int) -> int:
    """Returns the memory of a process and its descendants."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended
                memory = process.memory_full_info() if sys.platform == "linux" else process.memory_info()
                total += getattr(memory, "pss", memory.rss)
    return total


def peak_memory(pid: int, work: Callable[[], object]) -> int:
    """Returns the peak memory of a process and its descendants while `work` runs."""
    samples, done = [total_memory(pid)], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLING_SECONDS):
            samples.append(total_memory(pid))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        work()
        samples.append(total_memory(pid))
    finally:
        done.set()
        sampler.join()
    return max(samples)


def _cut_prompts(words: Sequence[int], count: int, length: int) -> list[tuple[int, ...]]:
    """Returns prompts that begin at different positions of `words`, so that none is in the prompt cache."""
    step = max(len(words) // count, 1)
    return [tuple(islice(cycle(words), at, at + length)) for at in range(0, count * step, step)]
