"""Fuzzes every socket with random, mutated and truncated frames: no crash, hang or growth, no effect on other peers.

    python -m tests.harness.fuzz_frames                                # 1,000,000 at each socket
    python -m tests.harness.fuzz_frames --socket workers --frames 50000 --seed 7

The sockets are `workers` and `clients` (the orchestrator's), `target` and `drafter` (a worker's, with a malicious
orchestrator), and `wire` (raw bytes below ZeroMQ, at the clients' socket on TCP). Everything behind a socket is real,
except models and processes; `tests.harness.soak_with_faults` sends such frames to a whole server.
Prints a line for each twentieth of the frames. The exit code is 1 if something crashed or hung, an honest request was
disturbed, or memory or open files have grown since the first fifth.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import random
import time
from collections.abc import Callable
from functools import partial

from outrider.orchestrator.cli import run_as_program
from outrider.protocol import values
from tests.harness.fuzz.clients_socket import ClientsSocketFuzz
from tests.harness.fuzz.fuzz_target import FuzzFailure, FuzzTarget
from tests.harness.fuzz.wire import WireFuzz
from tests.harness.fuzz.worker import WorkerFuzz
from tests.harness.fuzz.workers_socket import WorkersSocketFuzz
from tests.harness.soak import EXTRA_FILES, GROWTH, memory_and_files

TARGETS: dict[str, Callable[[random.Random], FuzzTarget]] = {
    "workers": WorkersSocketFuzz,
    "clients": ClientsSocketFuzz,
    "target": partial(WorkerFuzz, target=True),
    "drafter": partial(WorkerFuzz, target=False),
    "wire": WireFuzz,
}
BATCH = 100
PARTS = 20
TIMEOUT_S = 600


def own_memory_and_files() -> tuple[int, int]:
    """Returns the memory in bytes and the open files of this process."""
    gc.collect()
    return memory_and_files(os.getpid())


def fuzz(name: str, frames: int, seed: int, log: Callable[[str], None]) -> bool:
    """Fuzzes a socket with this many frames. Returns whether it withstood them."""
    target = TARGETS[name](random.Random(f"{name} {seed}"))
    began, early = time.monotonic(), (0, 0)
    try:
        for number in range(0, frames, BATCH):
            faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
            for _ in range(min(BATCH, frames - number)):
                target.send_broken()
            target.settle()
            if (number + BATCH) * 5 >= frames and early == (0, 0):
                early = own_memory_and_files()
            if number * PARTS // frames != (number + BATCH) * PARTS // frames:
                seconds = time.monotonic() - began
                used = own_memory_and_files()
                log(f"{name}: {number + BATCH:,} frames in {seconds:.0f} s; {target.summary()}; {used}")
        memory, files = own_memory_and_files()
    except FuzzFailure as broken:
        log(f"{name}: {broken}")
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
        target.close()
    log(f"{name}: {frames:,} frames, memory times {memory / early[0]:.3f}, open files {early[1]} and {files}")
    return memory <= GROWTH * early[0] and files <= early[1] + EXTRA_FILES


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", choices=(*TARGETS, "all"), default="all", help="socket to fuzz (default: all)")
    parser.add_argument(
        "--frames", type=int, default=1_000_000, metavar="N", help="frames per socket (default: 1,000,000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the frames (default: 0)")


def run(options: argparse.Namespace) -> int:
    frames = values.check_int("frames", options.frames, BATCH, 1_000_000_000)
    names = list(TARGETS) if options.socket == "all" else [options.socket]
    passed = [fuzz(name, frames, options.seed, lambda line: print(line, flush=True)) for name in names]
    return int(not all(passed))


if __name__ == "__main__":
    raise SystemExit(run_as_program())
