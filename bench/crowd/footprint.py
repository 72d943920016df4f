"""What an engine takes beside its speed: memory over all its processes, the wait for the first token of a long prompt,
and the wait for a start.

Ours is a server with its workers, llama.cpp is one process. Memory is what the system counts once (PSS; where there is
no such number, what each process has alone).
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any

import psutil

from outrider.bench.contest.contest import compete
from outrider.bench.contest.field import llama_name
from outrider.bench.contest.peers import Chosen, llama_cpp
from outrider.bench.crowd.ask import SEEDS, Batcher, ModeBatch, PeerBatch, Texts
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.sampling import SamplingParams

OURS = "auto"
REQUESTS, LENGTH, MADE = 4, 2048, 128
"""Memory is measured with so many requests at once, each of so many tokens, of which so many are made."""
PROMPT, ROUNDS = 1024, 6
SHORT, STARTS = 64, 3
LOOK_S = 0.2
MEBIBYTE = 1 << 20

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of each engine by its name. `memory`: the most bytes over all its processes. `first_ms`: the median wait for the
    first token of a prompt of PROMPT tokens.

    Of ours alone, medians: `start_s` from nothing to ready, the files being in the system's cache; `answers_ms` the
    wait for the first token of the first and of the second short request after a start.
    """

    memory: dict[str, int]
    first_ms: dict[str, float]
    start_s: float
    answers_ms: tuple[float, float]


def measure(
    given: dict[str, Any], settings: ServeSettings, peers: Chosen, words: Sequence[int], tell: Tell
) -> Footprint:
    """`given` are the cluster's settings as keywords; `words` any text, of which prompts are made.

    Raises:
        OutriderError: a cluster or a peer can't be started.
    """
    given = {**given, "memory": False}
    starts = [_start(given, words, tell) for _ in range(STARTS)]
    return Footprint(
        _memory(given, settings, peers, words, tell),
        _first_tokens(given, settings, peers, words, tell),
        statistics.median(start for start, _, _ in starts),
        (statistics.median(first for _, first, _ in starts), statistics.median(second for _, _, second in starts)),
    )


def lines(found: Footprint) -> list[str]:
    memory = ", ".join(f"{name} {size / MEBIBYTE:.0f} MiB" for name, size in found.memory.items())
    first = ", ".join(f"{name} {ms:.0f} ms" for name, ms in found.first_ms.items())
    return [
        f"- memory over all processes, {REQUESTS} requests of {LENGTH} tokens at once: {memory}",
        f"- first token of a prompt of {PROMPT} tokens: {first}",
        f"- a start takes {found.start_s:.1f} s; after it the first token of a request comes in"
        f" {found.answers_ms[0]:.0f} ms, of the next one in {found.answers_ms[1]:.0f} ms",
    ]


def total_memory(pid: int) -> int:
    """Of a process and all that descend from it."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # ended meanwhile
                memory = process.memory_full_info()
                total += getattr(memory, "pss", memory.uss)
    return total


def peak(pid: int, work: Callable[[], object]) -> int:
    """The most memory that was seen of a process and its descendants while `work` ran."""
    seen, done = [total_memory(pid)], threading.Event()

    def look() -> None:
        while not done.wait(LOOK_S):
            seen.append(total_memory(pid))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
        seen.append(total_memory(pid))
    finally:
        done.set()
        looking.join()
    return max(seen)


def _start(given: dict[str, Any], words: Sequence[int], tell: Tell) -> tuple[float, float, float]:
    begun = time.perf_counter()
    with LocalCluster(progress=tell, **given) as cluster:
        ready = time.perf_counter() - begun
        way = ModeBatch(OURS, cluster.client(), 1)
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        first, second = (way.run([piece], sampling)[0].first_ms for piece in _pieces(words, 2, SHORT))
    return ready, first, second


def _memory(
    given: dict[str, Any], settings: ServeSettings, peers: Chosen, words: Sequence[int], tell: Tell
) -> dict[str, int]:
    tell(f"memory of {REQUESTS} requests at once")
    texts = _pieces(words, REQUESTS, LENGTH - MADE)
    sampling = SamplingParams(max_tokens=MADE, ignore_eos=True, seed=0)
    with LocalCluster(progress=tell, **{"max_active": REQUESTS, **given}) as cluster:
        ours = ModeBatch(OURS, cluster.client(), REQUESTS)
        found = {OURS: peak(cluster.pid, lambda: ours.run(texts, sampling))}
    if peers.gguf is not None:
        with llama_cpp(settings, peers.gguf, slots=REQUESTS) as process:
            theirs = PeerBatch(llama_name(settings.threads), process)
            found[theirs.name] = peak(process.pid, lambda: theirs.run(texts, sampling))
    return found


def _first_tokens(
    given: dict[str, Any], settings: ServeSettings, peers: Chosen, words: Sequence[int], tell: Tell
) -> dict[str, float]:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(progress=tell, **given))
        ways: list[Batcher] = [ModeBatch(OURS, cluster.client(), 1)]
        if peers.gguf is not None:
            for threads in (settings.threads, 2 * settings.threads):
                process = stack.enter_context(llama_cpp(replace(settings, threads=threads), peers.gguf))
                ways.append(PeerBatch(llama_name(threads), process))
        prompts: list[Texts] = [[piece] for piece in _pieces(words, ROUNDS + 1, PROMPT)]
        found = compete(ways, prompts, sampling, lambda said: tell(f"first token, {said}"), seeds=SEEDS)
    return {name: statistics.median(round_[0].first_ms for round_ in rounds[1:]) for name, rounds in found.items()}


def _pieces(words: Sequence[int], count: int, length: int) -> list[tuple[int, ...]]:
    """Prompts that begin at different places, so that none is remembered from another."""
    around = [*words] * (1 + (length + count) // len(words))
    step = max(len(words) // count, 1)
    return [tuple((around * 2)[at : at + length]) for at in range(0, count * step, step)]
