"""Checks that interrupted texts continue unchanged on another server, and measures how long readers wait.

    python -m tests.harness.resume                          # 500 requests, then 20 kills: some minutes
    python -m tests.harness.resume --requests 40 --kills 2

*Requests*: each connection breaks at a random token, up to twice, also before the first token or after the last one, so
that only DONE is lost; the other of two servers continues. The requests use all modes, T = 0 and 0.8, penalties,
filters, stop strings, end tokens. Each text is compared with its text alone in `ar`; a differing one is replayed
through the target, and ties by rounding are listed. *Kills*: the server of a text, connected by TCP, is killed by
SIGKILL at a random token; measures the time until the next token. The exit code is 1 if a text differs.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import zmq

from outrider.bench.comparison.runs import Arrival
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client, Liveness, Resumed
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.client.dialogue import Chunk, Dialogue
from outrider.protocol import values
from outrider.protocol.errors import EndpointError
from outrider.protocol.messages import Done, Message
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import all_prompt_tokens, default_codec
from tests.harness.random_identity import DIFFERENT, SAME, Comparison, IdentityRun, count_verdicts
from tests.harness.random_requests import MODES, Sizes
from tests.harness.requests import TimedRequest, longest_wait, send

SIZES = Sizes(prompt=200, text=48)
AT_ONCE, MOST_CUTS = 4, 2
AT_END = 1 / 3
SECOND = 1.0
KILL_SAMPLING = SamplingParams(max_tokens=96, temp=0.8, ignore_eos=True)


class Cuts:
    """Draws for each request after how many tokens the connection of each attempt breaks; inf: just before DONE.

    Counts the broken connections (`made`), and those just before DONE (`at_end`).
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._left: dict[str, list[float]] = {}
        self.made = self.at_end = 0

    def next(self, dialogue: Dialogue) -> float | None:
        """Returns the number for the next attempt; None: its connection does not break."""
        if dialogue.request not in self._left:
            rng = random.Random(f"cuts {self._seed} {len(self._left)}")
            longest = dialogue.first_message.sampling.max_tokens
            self._left[dialogue.request] = [
                math.inf if rng.random() < AT_END else rng.randint(0, longest - 1)
                for _ in range(rng.randint(1, MOST_CUTS))
            ]
        return self._left[dialogue.request].pop() if self._left[dialogue.request] else None


class CuttingClient(Client):
    """A client with connections that break as planned by `cuts`."""

    def __init__(self, endpoint: str, cuts: Cuts) -> None:
        super().__init__(endpoint)
        self._cuts = cuts
        self._left: dict[str, float | None] = {}

    def run_once(self, dialogue: Dialogue) -> Iterator[Chunk]:
        self._left[dialogue.request] = self._cuts.next(dialogue)
        for chunk in super().run_once(dialogue):
            left = self._left[dialogue.request]
            self._left[dialogue.request] = None if left is None else left - len(chunk.token_ids)
            yield chunk

    def _receive(self, socket: zmq.Socket[bytes], liveness: Liveness, about: str | None = None) -> Message | None:
        left = self._left.get(about or "")
        if left is not None and left <= 0:
            self._cuts.made += 1
            raise EndpointError("the connection has broken")
        message = super()._receive(socket, liveness, about)
        if left is not None and isinstance(message, Done):
            self._cuts.made += 1
            self._cuts.at_end += 1
            raise EndpointError("the connection has broken")
        return message


def run_interrupted(requests: int, seed: int, screen: Screen) -> tuple[list[Comparison], Cuts]:
    """Runs interrupted requests. Returns the comparisons with uninterrupted texts, and the interruptions."""
    cuts = Cuts(seed)
    with (
        LocalCluster(progress=screen.show, draft_backend="none", mode="ar", prompt_cache=False, max_active=1) as alone,
        LocalCluster(progress=screen.show) as one,
        LocalCluster(progress=screen.show) as other,
    ):
        resuming = Resumed([CuttingClient(cluster.client().endpoint, cuts) for cluster in (one, other)])
        identity_run = IdentityRun(resuming, alone.client(), default_codec(), seed, SIZES, screen.show)
        return identity_run.run_block(0, requests, (AT_ONCE,)), cuts


class ServerKiller:
    """Kills the server `pid` when `tokens` of a text have arrived."""

    def __init__(self, pid: int, tokens: int) -> None:
        self._pid, self._left = pid, tokens
        self.killed_at = 0.0

    def record(self, arrival: Arrival) -> None:
        self._left -= arrival.tokens
        if self._left <= 0 and not self.killed_at:
            os.kill(self._pid, signal.SIGKILL)
            self.killed_at = time.perf_counter()


def run_kills(count: int, seed: int, screen: Screen) -> tuple[list[float], int]:
    """Kills `count` servers. Returns the clients' longest waits in seconds, and how many texts differ."""
    rng, waits, differing = random.Random(f"kills {seed}"), list[float](), 0
    prompt, sampling = tuple(all_prompt_tokens()[:64]), replace(KILL_SAMPLING, seed=seed)
    with LocalCluster(progress=screen.show) as steady:
        text = send(steady.client(), TimedRequest(prompt, sampling, "ar")).token_ids
        for number in range(count):
            with LocalCluster(progress=screen.show, endpoint="tcp://127.0.0.1:0") as doomed:
                screen.show(f"kills: {number} of {count}")
                killer = ServerKiller(doomed.pid, rng.randint(1, KILL_SAMPLING.max_tokens - 8))
                resuming = Resumed([Client(doomed.endpoint, timeout=SECOND), steady.client(SECOND)])
                reply = send(resuming, TimedRequest(prompt, sampling, MODES[number % len(MODES)]), killer.record)
            differing += reply.token_ids != text
            waits.append(longest_wait(reply.arrivals, killer.killed_at))
    return waits, differing


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="interrupted requests (default: 500)")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="servers to kill (default: 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the requests (default: 0)")


def run(options: argparse.Namespace) -> int:
    requests = values.check_int("requests", options.requests, 0, 100_000)
    count = values.check_int("kills", options.kills, 0, 10_000)
    screen, wrong = Screen(), 0
    if requests:
        found, cuts = run_interrupted(requests, options.seed, screen)
        screen.clear()
        print("\n".join([*(str(one) for one in found if one.verdict != SAME)]))
        interruptions = f"interrupted {cuts.made} times, {cuts.at_end} of them between the last token and the end"
        print(f"{requests} requests, {interruptions}: {count_verdicts(found)}", flush=True)
        wrong += sum(one.verdict == DIFFERENT for one in found)
    if count:
        waits, differing = run_kills(count, options.seed, screen)
        screen.clear()
        median, longest = 1000 * statistics.median(waits), 1000 * max(waits)
        print(
            f"{count} servers killed: next token after {median:.0f} ms (p50), {longest:.0f} ms (worst);"
            f" {differing} texts differ"
        )
        wrong += differing
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
