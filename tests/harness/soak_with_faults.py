"""Runs a long mixed load with a fault every five seconds, and checks that no text changes and nothing leaks.

    python -m tests.harness.soak_with_faults                       # 30 minutes
    python -m tests.harness.soak_with_faults --minutes 3 --seed 7

Four requests are always in flight: all modes, T = 0 and 0.8, penalties, biases, filters, stop strings, cancelled
requests. Faults are those of `tests.harness.faults`. The undisturbed texts are generated before, on the same cluster.
Prints the server's memory and open files each minute. The exit code is 1 if a text differs (certified ties are listed
and count as equal), a request fails, memory or open files have grown since the first fifth of the time, or a resource
is still in use at the end.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from tests.harness.chaos import AT_ONCE, TIMEOUT_S, WORKER_TIMEOUT, Load
from tests.harness.faults import Faults
from tests.harness.random_identity import DIFFERENT, SAME
from tests.harness.soak import EXTRA_FILES, GROWTH, memory_and_files, wait_until_idle

EVERY_S = 5.0
MINUTE_S = 60.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=int, default=30, metavar="N", help="duration (default: 30)")
    parser.add_argument("--texts", type=int, default=48, metavar="N", help="different requests (default: 48)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of requests and faults (default: 0)")


def run(options: argparse.Namespace) -> int:
    seconds = values.check_int("minutes", options.minutes, 1, 10_000) * MINUTE_S
    texts = values.check_int("texts", options.texts, AT_ONCE, 10_000)
    with LocalCluster(max_active=2 * AT_ONCE, worker_timeout=WORKER_TIMEOUT) as cluster:
        load = Load(cluster.client(timeout=TIMEOUT_S), texts, options.seed, cancels=True)
        faults = Faults(cluster, random.Random(f"faults {options.seed}"))
        early = (0, 0)
        with load.running():
            began = time.monotonic()
            minute = 0
            while (now := time.monotonic() - began) < seconds:
                faults.inject_random()
                if early == (0, 0) and now >= seconds / 5:
                    early = memory_and_files(cluster.pid)
                if now // MINUTE_S >= minute:
                    minute += 1
                    print(f"{now:.0f} s: {_format_status(load, faults, cluster)}", flush=True)
                time.sleep(max(EVERY_S - (time.monotonic() - began - now), 0.0))
        stats = wait_until_idle(cluster)
        late = memory_and_files(cluster.pid)
        leaks = [name for name, count in (("requests run", stats.active), ("wait", stats.queued),
                                          ("bytes are reserved", stats.kv.reserved)) if count]  # fmt: skip
    differing = [str(one) for one in load.comparisons if one.verdict != SAME]
    print("\n".join([*differing, *load.failed, *(f"still {leak}" for leak in leaks)]))
    growth = late[0] / max(early[0], 1)
    verdicts = Counter(one.verdict for one in load.comparisons)
    print(f"{len(load.comparisons)} texts, {verdicts}; {len(load.failed)} failed; faults:"
          f" {dict(faults.counts)}; memory times {growth:.3f}, open files {early[1]} and {late[1]}")  # fmt: skip
    passed = not load.failed and not leaks and all(one.verdict != DIFFERENT for one in load.comparisons)
    return 0 if passed and growth <= GROWTH and late[1] <= early[1] + EXTRA_FILES else 1


def _format_status(load: Load, faults: Faults, cluster: LocalCluster) -> str:
    size, files = memory_and_files(cluster.pid)
    return (
        f"{len(load.comparisons)} texts, {faults.counts.total()} faults, {len(load.failed)} failed; server"
        f" {size >> 20} MiB, {files} files"
    )


if __name__ == "__main__":
    raise SystemExit(run_as_program())
