"""What a pause costs: each process of a cluster is stopped in the middle of a request, and goes on.

    python -m outrider.bench.pauses                # 20 s of SIGSTOP for target, drafter, server and a client each
    python -m outrider.bench.pauses --seconds 5

Two clients ask in turns. The text must be what it is without a pause, and the other client, whom nobody stopped, must
have its own; the exit code is 1 where that does not hold. Prints how long each request took.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.sampling import SamplingParams

PROMPT = "def fibonacci(n):"
TOKENS = 200
STOPPED = ("target", "draft", "server", "client")
# A client in a process of its own, so that it can be stopped; it says when its first token has come, and then its text.
CLIENT = f"""
import sys
from outrider import Client, SamplingParams
sampling = SamplingParams(max_tokens={TOKENS}, ignore_eos=True, temp=1.0, seed=1)
stream = Client(sys.argv[1], timeout=float(sys.argv[2])).stream({PROMPT!r}, sampling, mode="ssd")
for count, _ in enumerate(stream):
    if count == 0:
        print("begun", flush=True)
print(list(stream.result.token_ids), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Pause:
    """What was stopped, how long the request took in whose middle that was, and whether both clients had their text."""

    what: str
    seconds: float
    whole: bool
    beside: bool
    states: str


def measure(what: str, seconds: float, whole: str, cluster: LocalCluster) -> Pause:
    """One request with a pause of `what` in its middle, and one of another client's that is asked meanwhile."""
    patience = 10 + 3 * seconds
    client = cluster.client(timeout=patience)
    with subprocess.Popen(
        python("-c", CLIENT, cluster.endpoint, str(patience)),
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as asking:
        first = asking.stdout.readline() if asking.stdout else ""
        started = time.monotonic()
        workers = {worker.role: worker.pid for worker in client.stats().workers}
        pid = {"server": cluster.pid, "client": asking.pid, **workers}[what]
        os.kill(pid, signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()
        beside = client.generate(PROMPT, SamplingParams(max_tokens=16, ignore_eos=True, temp=1.0, seed=1))
        tokens = asking.communicate()[0].strip()
        took = time.monotonic() - started
    time.sleep(2)  # two pings, so that who was silent has been heard
    states = ", ".join(f"{worker.name} {worker.state}" for worker in client.stats().workers)
    return Pause(what, took, first == "begun\n" and tokens == whole, str(list(beside.token_ids))[:-1] in whole, states)


def run(options: argparse.Namespace) -> int:
    pauses = []
    with LocalCluster(max_active=2) as cluster:
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temp=1.0, seed=1)
        whole = str(list(cluster.client().generate(PROMPT, sampling, mode="ar").token_ids))
        print(f"{options.seconds:g} s of SIGSTOP; {TOKENS} tokens with another client beside")
        for what in STOPPED:
            pause = measure(what, options.seconds, whole, cluster)
            pauses.append(pause)
            verdict = "its text" if pause.whole else "ANOTHER TEXT"
            beside = "its text" if pause.beside else "ANOTHER TEXT"
            print(f"  {what:8}{pause.seconds:7.1f} s  {verdict}; beside: {beside}; then {pause.states}", flush=True)
    return 0 if all(pause.whole and pause.beside for pause in pauses) else 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, metavar="S", help="default 20")


if __name__ == "__main__":
    raise SystemExit(run_as_program())
