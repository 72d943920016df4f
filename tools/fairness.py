"""Measures fairness: equal requests take about the same time, and a long prompt does not stall decoding requests.

    python -m tools.fairness                        # ar, sd, ssd and auto, three rounds each: some minutes
    python -m tools.fairness --modes ar --rounds 1

*Equal*: 16 concurrent requests of one length; the slowest time over the median. *Newcomer*: a prompt of 900 tokens
arrives while 8 requests decode; their longest gap between two chunks until the newcomer's first token, over their
median gap. Prints the median and the worst round of both by mode. The exit code is 1 if a median exceeds its limit.
"""

from __future__ import annotations

import argparse
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain

from outrider.bench.commands.files import TINY_FOLDER, load_prompts, parse_modes
from outrider.bench.comparison.runs import Reply
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import default_codec
from tests.harness.requests import TimedRequest, send, send_all

EQUAL_REQUESTS, PROMPT_TOKENS, EQUAL_TOKENS = 16, 64, 96
DECODING_REQUESTS, DECODING_TOKENS, NEWCOMER_TOKENS = 8, 224, 900
# The newcomer arrives when the decoding requests have this many tokens each, on average.
SETTLED_TOKENS = 24
MAX_SLOWEST_RATIO, MAX_GAP_RATIO = 1.3, 3.0

Text = tuple[int, ...]


def measure_slowest_ratio(client: Client, mode: str, text: Text, sampling: SamplingParams) -> float:
    """Returns the slowest time of equal requests over the median."""
    first, prompt = sampling.seed or 0, text[:PROMPT_TOKENS]
    samplings = [replace(sampling, max_tokens=EQUAL_TOKENS, seed=first + n) for n in range(EQUAL_REQUESTS)]
    requests = [TimedRequest(prompt, sampling, mode) for sampling in samplings]
    times = [reply.ended - reply.sent for reply in send_all(client, requests)]
    return max(times) / statistics.median(times)


def measure_gap_ratio(client: Client, mode: str, text: Text, sampling: SamplingParams) -> float:
    """Returns the longest gap of decoding requests while a newcomer's prompt is read, over their median gap."""
    long = replace(sampling, max_tokens=DECODING_TOKENS)
    settled = threading.Semaphore(0)
    with ThreadPoolExecutor(DECODING_REQUESTS + 1) as threads:
        decoding = [
            threads.submit(
                send,
                client,
                TimedRequest(text[n * PROMPT_TOKENS : (n + 1) * PROMPT_TOKENS], replace(long, seed=n), mode),
                lambda arrival: settled.release(arrival.tokens),
            )
            for n in range(DECODING_REQUESTS)
        ]
        for _ in range(SETTLED_TOKENS * DECODING_REQUESTS):
            settled.acquire()
        newcomer = send(client, TimedRequest(text[-NEWCOMER_TOKENS:], replace(sampling, max_tokens=2), mode))
    return gap_ratio([future.result() for future in decoding], newcomer)


def gap_ratio(decoding: Sequence[Reply], newcomer: Reply) -> float:
    """Returns the longest gap that overlaps the reading of the newcomer's prompt, over the median of all gaps."""
    sent, first_token = newcomer.sent, newcomer.arrivals[0].at
    overlapping = [
        gap
        for reply in decoding
        for gap, arrival in zip(reply.gaps_ms, reply.arrivals[1:], strict=True)
        if sent <= arrival.at and arrival.at - gap / 1000 <= first_token
    ]
    return max(overlapping) / statistics.median(chain.from_iterable(reply.gaps_ms for reply in decoding))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--modes", default="ar,sd,ssd,auto", help="comma-separated modes (default: ar,sd,ssd,auto)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each mode after one to warm up (default: 3)")
    readers = "prefill workers, which read the newcomer's prompt instead of the target (default: 0)"
    parser.add_argument("--prefill-workers", type=int, default=0, help=readers)
    parser.add_argument("--temp", type=float, default=0.8, help="temperature (default: 0.8)")


def run(options: argparse.Namespace) -> int:
    modes = parse_modes(options.modes)
    rounds = values.check_int("rounds", options.rounds, 1, 1000)
    sampling = SamplingParams(temp=options.temp, ignore_eos=True, seed=0)
    codec = default_codec()
    text = codec.encode("\n".join(load_prompts(TINY_FOLDER, ["code"])["code"]))
    trials: dict[str, tuple[Callable[[Client, str, Text, SamplingParams], float], float]] = {
        f"equal requests, {EQUAL_REQUESTS}: slowest over median": (measure_slowest_ratio, MAX_SLOWEST_RATIO),
        f"newcomer of {NEWCOMER_TOKENS} tokens, {DECODING_REQUESTS} decoding: longest gap over median": (
            measure_gap_ratio,
            MAX_GAP_RATIO,
        ),
    }
    screen, missed = Screen(), False
    # No prompt cache, so that the newcomer of the second round is read, too.
    with LocalCluster(
        progress=screen.show,
        max_active=EQUAL_REQUESTS,
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
                print(f"{name}, {mode:4} {middle:.2f} (worst {worst:.2f}), limit {most:g}", flush=True)
                missed |= middle > most
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
