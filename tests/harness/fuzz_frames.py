"""Fuzzes every socket with random, mutated and truncated frames: no crash, hang or growth, no effect on other peers.

    python -m tests.harness.fuzz_frames                                # 1,000,000 at each socket
    python -m tests.harness.fuzz_frames --socket workers --frames 50000 --seed 7

The sockets are `workers` and `clients` (the orchestrator's), `target` and `drafter` (a worker's, with a malicious
orchestrator), and `wire` (raw bytes below ZeroMQ, at the clients' socket on TCP). Everything behind a socket is real,
except models and processes; with `--socket processes` these are real, too, and both sockets of a server are fuzzed.
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

import psutil

from outrider.orchestrator.cli import run_as_program
from outrider.protocol import values
from tests.harness.fuzz.clients_hall import ClientsHall
from tests.harness.fuzz.hall import Broken, Hall
from tests.harness.fuzz.processes_hall import ProcessesHall
from tests.harness.fuzz.wire_hall import WireHall
from tests.harness.fuzz.worker_hall import WorkerHall
from tests.harness.fuzz.workers_hall import WorkersHall
from tests.harness.soak import GROWTH, resident

HALLS: dict[str, Callable[[random.Random], Hall]] = {
    "workers": WorkersHall,
    "clients": ClientsHall,
    "target": partial(WorkerHall, target=True),
    "drafter": partial(WorkerHall, target=False),
    "wire": WireHall,
}
REAL = {"processes": ProcessesHall}
BATCH = 100
PARTS = 20
HANGS_S = 600
FEW_FILES = 8  # short-lived connections


def held(pid: int) -> tuple[int, int]:
    """Returns the memory in KiB and the open files of a process."""
    gc.collect()
    return resident({"": pid})[""], psutil.Process(pid).num_fds()


def fuzz(name: str, frames: int, seed: int, tell: Callable[[str], None]) -> bool:
    """Returns whether a socket withstands this many frames."""
    hall = (HALLS | REAL)[name](random.Random(f"{name} {seed}"))
    pid = getattr(hall, "pid", os.getpid())
    began, early = time.monotonic(), (0, 0)
    try:
        for number in range(0, frames, BATCH):
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            for _ in range(min(BATCH, frames - number)):
                hall.fire()
            hall.rest()
            if (number + BATCH) * 5 >= frames and early == (0, 0):
                early = held(pid)
            if number * PARTS // frames != (number + BATCH) * PARTS // frames:
                seconds = time.monotonic() - began
                tell(f"{name}: {number + BATCH:,} frames in {seconds:.0f} s; {hall.told()}; {held(pid)}")
        memory, files = held(pid)
    except Broken as broken:
        tell(f"{name}: {broken}")
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
        hall.close()
    tell(f"{name}: {frames:,} frames, memory times {memory / early[0]:.3f}, open files {early[1]} and {files}")
    return memory <= GROWTH * early[0] and files <= early[1] + FEW_FILES


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", choices=(*HALLS, *REAL, "all"), default="all", help="socket to fuzz (default: all)")
    parser.add_argument(
        "--frames", type=int, default=1_000_000, metavar="N", help="frames per socket (default: 1,000,000)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the frames (default: 0)")


def run(options: argparse.Namespace) -> int:
    frames = values.whole("frames", options.frames, BATCH, 1_000_000_000)
    names = list(HALLS) if options.socket == "all" else [options.socket]
    stood = [fuzz(name, frames, options.seed, lambda told: print(told, flush=True)) for name in names]
    return int(not all(stood))


if __name__ == "__main__":
    raise SystemExit(run_as_program())
