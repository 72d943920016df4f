"""Many requests of random sizes, some cancelled: none may be lost, and memory must stay what it was.

    python -m outrider.bench.soak                               # 1,000 requests, 8 at once, one in ten cancelled
    python -m outrider.bench.soak --requests 60 --kv-memory 20MB

Prints the resident memory of target, drafter and server after a fifth of the requests and at the end, and what the
prompt caches hold. The exit code is 1 where a request is lost, a place or a byte is not given back, or a process has
grown by more than 5 %.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from outrider.bench.prompts import mixed
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pair.model_files import EMBEDDED_TARGET, find_model
from outrider.orchestrator.pair.tokenizer import load_codec
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Stats
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.values import size

GROWTH = 1.05
PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Wish:
    """One request: how much of the words it begins with, how long its text is, and after how many pieces it is
    cancelled (None: never)."""

    first: int
    count: int
    length: int
    temp: float
    mode: str
    patience: int | None


def wishes(count: int, words: int, seed: int) -> list[Wish]:
    """Random ones; a third begin with the same words."""
    draws, made = random.Random(seed), []
    for _ in range(count):
        prompt = draws.choice((1, 8, 60, 250, draws.randint(1, 700)))
        first = draws.choice((0, draws.randrange(words - prompt), draws.randrange(words - prompt)))
        patience = draws.randint(0, 4) if draws.random() < 0.1 else None
        mode = draws.choice(("ar", "sd", "ssd", "auto"))
        made.append(Wish(first, prompt, draws.choice((1, 8, 24, 60)), draws.choice((0.0, 0.8)), mode, patience))
    return made


def resident(pids: dict[str, int]) -> dict[str, int]:
    """KiB of each process."""
    told = {name: subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=False)
            for name, pid in pids.items()}  # fmt: skip
    return {name: int(said.stdout or 0) for name, said in told.items()}


def ask(cluster: LocalCluster, words: list[int], wish: Wish, number: int) -> str:
    """Its end: eos, length, cancelled, or the error."""
    sampling = SamplingParams(max_tokens=wish.length, temp=wish.temp, seed=number)
    try:
        stream = cluster.client().stream(words[wish.first : wish.first + wish.count], sampling, mode=wish.mode)
        for count, _ in enumerate(stream):
            if count == wish.patience:
                return "cancelled"  # leaving the loop cancels
        return stream.result.finish_reason
    except OutriderError as error:
        return f"{type(error).__name__}: {error}"


def settled(cluster: LocalCluster) -> Stats:
    """The statistics once nothing runs."""
    deadline, client = time.monotonic() + PATIENCE_S, cluster.client()
    while (stats := client.stats()).active + stats.queued and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)  # the last CLOSE is on its way to the workers
    return client.stats()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--kv-memory", default="60MB", help="little, so that the caches are full after a fifth")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    codec = load_codec(find_model(str(EMBEDDED_TARGET)))
    words = [token for prompt in mixed(62) for token in codec.encode(prompt.text)]
    plan = wishes(options.requests, len(words), options.seed)
    ends: list[str] = []
    with LocalCluster(max_active=options.at_once, kv_memory=options.kv_memory) as cluster:
        pids = {worker.name: worker.pid for worker in cluster.client().stats().workers} | {"server": cluster.pid}
        early = plan[: max(options.requests // 5, 1)]
        sizes = []
        for part in (early, plan[len(early) :]):
            with ThreadPoolExecutor(options.at_once + 2) as threads:
                numbered = enumerate(part, len(ends))
                ends += threads.map(lambda one: ask(cluster, words, one[1], one[0]), list(numbered))
            stats = settled(cluster)
            sizes.append(resident(pids))
    grown = {name: sizes[1][name] / max(sizes[0][name], 1) for name in pids}
    for name in pids:
        print(f"{name}: {sizes[0][name] / 1024:.0f} MiB, in the end {sizes[1][name] / 1024:.0f}: {grown[name]:.3f}")
    for worker in stats.workers:
        use = worker.cache
        print(f"{worker.name}: {use.entries} texts kept in {use.bytes / 1e6:.1f} MB, {use.hits} of {use.lookups} found"
              f" something, {use.tokens_saved} tokens not read again")  # fmt: skip
    lost = [end for end in ends if end not in ("eos", "length", "stop", "cancelled")]
    held = sum(worker.cache.bytes for worker in stats.workers)
    print(f"{len(ends)} requests, {ends.count('cancelled')} cancelled, {len(lost)} lost; {stats.active} still run")
    for end in lost[:5]:
        print(end)
    sound = not lost and not stats.active and not stats.queued and held <= size("kv_memory", options.kv_memory)
    return 0 if sound and max(grown.values()) <= GROWTH else 1


if __name__ == "__main__":
    raise SystemExit(run_as_program())
