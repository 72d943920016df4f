"""Runs many requests of random sizes, some cancelled, and checks that none is lost and memory does not grow.

    python -m tests.harness.soak       # 1,000 requests, 8 at once, one in eight cancelled: half an hour on two cores
    OUTRIDER_MODEL=tiny python -m tests.harness.soak --kv-memory 60MB

Prints the resident memory of target, drafter and server after a fifth of the requests and at the end, and the size of
the prompt caches at both times, to tell a filling cache from a leak. The exit code is 1 if a request is lost, a slot or
memory is not released, or a process has grown by more than 5 %.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import psutil

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Stats
from outrider.protocol.values import check_size
from tests.harness.default_model import all_prompt_tokens
from tests.harness.random_requests import Sizes, draw_prompt, draw_request
from tests.harness.requests import TimedRequest, send

GROWTH = 1.05
EXTRA_FILES = 8  # short-lived connections
SIZES = Sizes(prompt=700, text=60)
TIMEOUT_S = 30.0


def memory_and_files(pid: int) -> tuple[int, int]:
    """Returns the resident memory of a process in bytes, and its open files."""
    process = psutil.Process(pid)
    return process.memory_info().rss, process.num_fds()


def send_and_get_end(client: Client, request: TimedRequest) -> str:
    """Sends a request, and returns how it ended: eos, stop, length, cancelled, or the error."""
    try:
        return send(client, request).reason
    except OutriderError as error:
        return f"{type(error).__name__}: {error}"


def wait_until_idle(cluster: LocalCluster) -> Stats:
    """Waits until no request is active, and returns the statistics."""
    deadline, client = time.monotonic() + TIMEOUT_S, cluster.client()
    while (stats := client.stats()).active + stats.queued and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)  # for the last CLOSE to reach the workers
    return client.stats()


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--kv-memory", default="240MB", help="small, so that caches are full after a fifth")
    parser.add_argument("--seed", type=int, default=1)


def run(options: argparse.Namespace) -> int:
    source = all_prompt_tokens()
    prompts = [draw_prompt(number, options.seed, source, SIZES) for number in range(options.requests)]
    plan = [replace(draw_request(number, options.seed, one), after=0.0) for number, one in enumerate(prompts)]
    ends: list[str] = []
    with LocalCluster(max_active=options.at_once, kv_memory=options.kv_memory) as cluster:
        pids = {worker.name: worker.pid for worker in cluster.client().stats().workers} | {"server": cluster.pid}
        early = plan[: max(options.requests // 5, 1)]
        sizes, caches = [], []
        for part in (early, plan[len(early) :]):
            with ThreadPoolExecutor(options.at_once + 2) as threads:
                ends += threads.map(partial(send_and_get_end, cluster.client()), part)
            stats = wait_until_idle(cluster)
            sizes.append({name: memory_and_files(pid)[0] for name, pid in pids.items()})
            caches.append({worker.name: worker.cache.bytes / 1e6 for worker in stats.workers})
    growth = {name: sizes[1][name] / sizes[0][name] for name in pids}
    for name in pids:
        print(f"{name}: {sizes[0][name] >> 20} MiB, in the end {sizes[1][name] >> 20}: {growth[name]:.3f}")
    for worker in stats.workers:
        use = worker.cache
        early_mb, late_mb = (part[worker.name] for part in caches)
        print(f"{worker.name}: {use.entries} texts kept in {late_mb:.1f} MB ({early_mb:.1f} after a fifth), {use.hits}"
              f" of {use.lookups} found something, {use.tokens_saved} tokens not read again")  # fmt: skip
    lost = [end for end in ends if end not in ("eos", "length", "stop", "cancelled")]
    kept = sum(worker.cache.bytes for worker in stats.workers)
    print(f"{len(ends)} requests, {ends.count('cancelled')} cancelled, {len(lost)} lost; {stats.active} still run")
    for end in lost[:5]:
        print(end)
    passed = not lost and not stats.active and not stats.queued and kept <= check_size("kv_memory", options.kv_memory)
    return 0 if passed and max(growth.values()) <= GROWTH else 1


if __name__ == "__main__":
    raise SystemExit(run_as_program())
