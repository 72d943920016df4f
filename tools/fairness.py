"""Nobody waits for somebody else's work: equal requests end alike, and a long prompt holds up nobody who decodes.

    python -m tools.fairness                        # ar, sd, ssd and auto, three rounds each: some minutes
    python -m tools.fairness --modes ar --rounds 1

*Equal*: 16 requests of one length at once; the slowest one's time over the median. *Newcomer*: 8 requests decode when
one with a prompt of 900 tokens arrives; the longest gap between two chunks of any of the 8, until the newcomer's first
token, over their median gap. Prints both for each mode, the median and the worst round; the exit code is 1 where a
median is above what is asked for.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

from outrider.bench.commands.files import modes_of
from outrider.bench.comparison.requests import Reply, TimedRequest, send, send_all
from outrider.bench.prompts import load
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import default_codec

EQUAL, PROMPT_TOKENS, TOKENS = 16, 64, 96
DECODING, DECODED, LONG_PROMPT = 8, 224, 900
# The newcomer comes when those who decode have had so many tokens each, on average.
SETTLED = 24
MOST_SLOWER, MOST_GAP = 1.3, 3.0

Text = tuple[int, ...]


def slowest(client: Client, mode: str, text: Text, sampling: SamplingParams) -> float:
    """The slowest of equal requests over the median one."""
    alike = replace(sampling, max_tokens=TOKENS)
    cut = text[:PROMPT_TOKENS]
    questions = [TimedRequest(cut, replace(alike, seed=(sampling.seed or 0) + n), mode) for n in range(EQUAL)]
    times = [reply.ended - reply.sent for reply in send_all(client, questions)]
    return max(times) / statistics.median(times)


def longest_gap(client: Client, mode: str, text: Text, sampling: SamplingParams) -> float:
    """The longest gap of those who decode while a newcomer's prompt is read, over their median gap."""
    long = replace(sampling, max_tokens=DECODED)
    settled = threading.Semaphore(0)
    with ThreadPoolExecutor(DECODING + 1) as threads:
        decoding = [
            threads.submit(
                send,
                client,
                TimedRequest(text[n * PROMPT_TOKENS : (n + 1) * PROMPT_TOKENS], replace(long, seed=n), mode),
                lambda arrival: settled.release(arrival.tokens),
            )
            for n in range(DECODING)
        ]
        for _ in range(SETTLED * DECODING):
            settled.acquire()
        newcomer = send(client, TimedRequest(text[-LONG_PROMPT:], replace(sampling, max_tokens=2), mode))
    return stall([future.result() for future in decoding], newcomer)


def stall(decoding: Sequence[Reply], newcomer: Reply) -> float:
    """The longest gap that touches the newcomer's reading, over the median of all."""
    begun, read = newcomer.sent, newcomer.arrivals[0].at
    touched = [
        gap
        for reply in decoding
        for gap, arrival in zip(reply.gaps_ms, reply.arrivals[1:], strict=True)
        if begun <= arrival.at and arrival.at - gap / 1000 <= read
    ]
    return max(touched) / statistics.median(chain.from_iterable(reply.gaps_ms for reply in decoding))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default="ar,sd,ssd,auto", help="with commas between")
    parser.add_argument("--rounds", type=int, default=3, help="of each, after one to warm up; default 3")
    readers = "that read the newcomer's prompt instead of the target; default 0"
    parser.add_argument("--prefill-workers", type=int, default=0, help=readers)
    parser.add_argument("--temp", type=float, default=0.8, help="default 0.8")


def run(options: argparse.Namespace) -> int:
    modes = modes_of(options.modes)
    rounds = values.whole("rounds", options.rounds, 1, 1000)
    sampling = SamplingParams(temp=options.temp, ignore_eos=True, seed=0)
    codec = default_codec()
    text = codec.encode("\n".join(prompt.text for prompt in load("code")))
    trials: dict[str, tuple[Callable[[Client, str, Text, SamplingParams], float], float]] = {
        f"equal requests, {EQUAL}: slowest over median": (slowest, MOST_SLOWER),
        f"newcomer of {LONG_PROMPT} beside {DECODING}: longest gap over median": (longest_gap, MOST_GAP),
    }
    screen, missed = Screen(), False
    # Without a prompt cache, or the newcomer of the second round would have nothing to read.
    with LocalCluster(
        progress=screen.show,
        max_active=EQUAL,
        prompt_cache=False,
        memory=False,
        prefill_workers=options.prefill_workers,
    ) as cluster:
        for name, (trial, most) in trials.items():
            for mode in modes:
                found = []
                for turn in range(rounds + 1):
                    screen.show(f"{name}: {mode}, round {turn} of {rounds}")
                    found.append(trial(cluster.client(), mode, text, replace(sampling, seed=100 * turn)))
                screen.clear()
                middle, worst = statistics.median(found[1:]), max(found[1:])
                print(f"{name}, {mode:4} {middle:.2f} (worst {worst:.2f}), asked {most:g}", flush=True)
                missed |= middle > most
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
