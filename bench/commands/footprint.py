"""The footprint of a server for `outrider bench --suite`, and of llama.cpp on the same file.

Memory of all processes (PSS, or USS where the system has no PSS), time to first token of a long prompt, and start-up
time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import psutil

from outrider.bench.comparison.peers import ChosenPeers, llama_cpp
from outrider.bench.comparison.runners import llama_name
from outrider.bench.comparison.runs import SEEDS, BatchRunner, Texts, mode_batch, run_interleaved
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.sampling import SamplingParams

OURS = "auto"
REQUESTS, LENGTH, MADE = 4, 2048, 128
"""Memory is measured with REQUESTS concurrent requests of LENGTH tokens each, of which MADE are generated."""
PROMPT, ROUNDS = 1024, 6
SHORT, STARTS = 64, 3
SAMPLING_S = 0.2
MEBIBYTE = 1 << 20
TWO = SamplingParams(max_tokens=2, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory and latencies. By engine name: `memory`, the peak of all processes in bytes; `first_ms`, the median time
    to first token of a prompt of PROMPT tokens.

    Of Outrider only, medians: `start_s`, from launch to ready with files in the page cache; `answers_ms`, the time to
    first token of the first and second short request after a start.
    """

    memory: dict[str, int]
    first_ms: dict[str, float]
    start_s: float
    answers_ms: tuple[float, float]


def measure_footprint(
    given: dict[str, Any],
    settings: ServeSettings,
    peers: ChosenPeers,
    words: Sequence[int],
    tell: Callable[[str], None],
) -> Footprint:
    """Measures the footprint. `given` are the cluster's settings as keywords; prompts are cut from the tokens `words`.

    Raises:
        OutriderError: a cluster or a peer can't be started.
    """
    given = {"progress": tell, **given, "memory": False}
    starts = []
    for _ in range(STARTS):
        begun = time.perf_counter()
        with LocalCluster(**given) as cluster:
            ready = time.perf_counter() - begun
            short = _prompts(words, 2, SHORT)
            starts.append((ready, *(mode_batch(cluster.client(), OURS, 1)([p], TWO)[0].first_ms for p in short)))
    start_s, first, second = map(statistics.median, zip(*starts, strict=True))

    tell(f"memory of {REQUESTS} concurrent requests")
    texts = _prompts(words, REQUESTS, LENGTH - MADE)
    sampling = SamplingParams(max_tokens=MADE, ignore_eos=True, seed=0)
    with LocalCluster(**{"max_active": REQUESTS, **given}) as cluster:
        ours = mode_batch(cluster.client(), OURS, REQUESTS)
        memory = {OURS: peak(cluster.pid, lambda: ours(texts, sampling))}
    if peers.gguf is not None:
        with llama_cpp(settings, peers.gguf, slots=REQUESTS) as process:
            memory[llama_name(settings.threads)] = peak(process.pid, lambda: process.run_batch(texts, sampling))

    with ExitStack() as stack:
        client = stack.enter_context(LocalCluster(**given)).client()
        runners: dict[str, BatchRunner] = {OURS: mode_batch(client, OURS, 1)}
        if peers.gguf is not None:
            for threads in (settings.threads, 2 * settings.threads):
                process = stack.enter_context(llama_cpp(replace(settings, threads=threads), peers.gguf))
                runners[llama_name(threads)] = process.run_batch
        prompts: list[Texts] = [[prompt] for prompt in _prompts(words, ROUNDS + 1, PROMPT)]
        runs = run_interleaved(runners, prompts, TWO, lambda message: tell(f"first token, {message}"), seeds=SEEDS)
    first_ms = {name: statistics.median(round_[0].first_ms for round_ in of[1:]) for name, of in runs.items()}
    return Footprint(memory, first_ms, start_s, (first, second))


def footprint_lines(found: Footprint) -> list[str]:
    memory = ", ".join(f"{name} {size / MEBIBYTE:.0f} MiB" for name, size in found.memory.items())
    first = ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.first_ms.items())
    return [
        f"- memory of all processes, {REQUESTS} concurrent requests of {LENGTH} tokens: {memory}",
        f"- time to first token of a prompt of {PROMPT} tokens: {first}",
        f"- start-up {found.start_s:.1f} s; time to first token of the first request after it"
        f" {found.answers_ms[0]:.0f} ms, of the second {found.answers_ms[1]:.0f} ms",
    ]


def total_memory(pid: int) -> int:
    """Returns the memory of a process and its descendants."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.uss)
    return total


def peak(pid: int, work: Callable[[], object]) -> int:
    """Returns the peak memory of a process and its descendants while `work` runs."""
    samples, done = [total_memory(pid)], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLING_S):
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


def _prompts(words: Sequence[int], count: int, length: int) -> list[tuple[int, ...]]:
    """Returns prompts that begin at different positions of `words`, so that none is in the prompt cache."""
    step = max(len(words) // count, 1)
    return [tuple(islice(cycle(words), at, at + length)) for at in range(0, count * step, step)]
