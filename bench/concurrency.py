"""Several requests at once: tokens per second of all together, beside mlx-lm's `batch_generate` on the same weights.

    python -m outrider.bench.concurrency                     # 1, 2, 4, 8, 16 at once, T = 0.8: ten minutes
    python -m outrider.bench.concurrency --at-once 4,8 --temp 0 --rounds 5

Every way makes the same texts, the ways taking turns within a round; a ratio's interval is over the rounds. Prompts'
reading counts for all alike: tokens over the time from the first request's sending to the last one's end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from outrider.bench.contest.contest import PeerProcess
from outrider.bench.contest.statistics import Timed, ratio, total_rate
from outrider.bench.prompts import mixed
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pair.model_files import EMBEDDED_TARGET, find_model
from outrider.orchestrator.pair.pairing import choose_pair
from outrider.orchestrator.pair.tokenizer import load_codec
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

PEER = "mlx-lm"


def together(client: Client, texts: Sequence[tuple[int, ...]], sampling: SamplingParams, mode: str) -> Timed:
    """All texts at once, a seed for each."""

    def one(numbered: tuple[int, tuple[int, ...]]) -> int:
        number, tokens = numbered
        return len(client.generate(tokens, replace(sampling, seed=number), mode=mode).token_ids)

    begun = time.perf_counter()
    with ThreadPoolExecutor(len(texts)) as threads:
        made = sum(threads.map(one, enumerate(texts)))
    return Timed(made, time.perf_counter() - begun)


def peer(process: PeerProcess, texts: Sequence[tuple[int, ...]], sampling: SamplingParams) -> Timed:
    """mlx-lm's batch of the same prompts."""
    told = process.ask({"batch": [list(text) for text in texts], "max_tokens": sampling.max_tokens,
                        "temp": sampling.temp, "seed": 0})  # fmt: skip
    return Timed(told["tokens"], told["seconds"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--at-once", default="1,2,4,8,16", help="how many requests at once, with commas between")
    parser.add_argument("--modes", default="ar,ssd,auto", help="with commas between")
    parser.add_argument("--rounds", type=int, default=4, help="of each way, after one to warm up")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each text")
    parser.add_argument("--temp", type=float, default=0.8)


def run(options: argparse.Namespace) -> int:
    try:
        widths = [int(width) for width in options.at_once.split(",")]
    except ValueError:
        raise InvalidRequest(f"--at-once is {options.at_once!r}; expected numbers with commas between") from None
    modes, screen = options.modes.split(","), Screen()
    sampling = SamplingParams(max_tokens=options.tokens, temp=options.temp, ignore_eos=True)
    codec = load_codec(find_model(str(EMBEDDED_TARGET)))
    texts = [codec.encode(prompt.text) for prompt in mixed(max(widths))]
    with (
        LocalCluster(progress=screen.show, max_active=max(widths)) as cluster,
        PeerProcess(choose_pair(ServeSettings()).settings) as process,
    ):
        client = cluster.client()
        for width in widths:
            runs: dict[str, list[Timed]] = {name: [] for name in (PEER, *modes)}
            for turn in range(options.rounds + 1):
                for name in runs:
                    screen.show(f"{width} at once, {name}, round {turn}")
                    chosen = texts[:width]
                    if name == PEER:
                        timed = peer(process, chosen, sampling)
                    else:
                        timed = together(client, chosen, sampling, name)
                    runs[name] += [timed] if turn else []
            screen.clear()
            told = [f"{name} {total_rate(found):.0f} ({ratio(found, runs[PEER])})" for name, found in runs.items()]
            print(f"{width:3d} at once: " + ", ".join(told), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
