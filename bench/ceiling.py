"""The most that speculation could bring beside plain decoding, many requests at once: the formula with measured times.

    python -m outrider.bench.ceiling                          # 4, 8 and 16 at once, T = 0 and 0.8: some minutes
    python -m outrider.bench.ceiling --at-once 8 --temps 0.8 --deepest 6

What is measured: how many tokens of long drafts the target accepts at each position of each text (SD, no copies), and
how long the target's forwards take by their rows, with so many texts, on its own core with nobody beside it. What is
supposed: each outcome is a hit, drafting, messages and prompts take no time, and each text has the number of drafts a
round that serves all best. Real rounds bring less; where even this is below a goal, the goal is out of reach.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.bench.commands.lists import numbers
from outrider.bench.embedded import mixed_tokens
from outrider.bench.helper import Helper
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.machine import cores
from outrider.orchestrator.pair.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings, settings_from
from outrider.protocol import values
from outrider.protocol.profile import Latency
from outrider.protocol.sampling import SamplingParams

COLUMNS = 192  # of each text, while forwards are timed

Odds = tuple[float, ...]
"""How likely the first, second... token of a draft is accepted, those before it included: falling."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """`gain`: tokens per second over plain decoding's; `drafts` a round, on average over the texts."""

    gain: float
    drafts: float


def ceiling(texts: Sequence[Odds], forward_ms: Callable[[int], float]) -> Ceiling:
    """The best that these texts can do together: drafts are added where they are likeliest, as long as that pays."""
    plain = len(texts) / forward_ms(len(texts))
    tokens, best = float(len(texts)), Ceiling(1.0, 0.0)
    likeliest = sorted((odds for text in texts for odds in text), reverse=True)
    for drafts, odds in enumerate(likeliest, 1):
        tokens += odds
        gain = tokens / forward_ms(len(texts) + drafts) / plain
        best = max(best, Ceiling(gain, drafts / len(texts)), key=lambda found: found.gain)
    return best


def accepted(client: Client, prompt: Sequence[int], sampling: SamplingParams, deepest: int) -> Odds:
    """How likely each position of a draft is accepted in this text."""
    timings = client.generate(list(prompt), sampling=sampling, mode="sd", num_draft_tokens=deepest).timings
    counts = zip(timings.accepted_by_position, timings.drafted_by_position, strict=True)
    return tuple(found / max(drafted, 1) for found, drafted in counts)


def forward_costs(settings: ServeSettings, texts: int, drafts: Sequence[int]) -> Latency:
    """How long the target's forwards take by their rows, this many texts together."""
    with Helper("outrider.bench.forwards", "--model", str(settings.model)) as helper:
        cores.place(helper.pid, "target", settings)
        told = helper.ask({"texts": texts, "columns": COLUMNS, "drafts": list(drafts)})
    return Latency(tuple(((1 + count) * texts, ms) for count, ms in zip(drafts, told["ms"], strict=True)))


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--at-once", default="4,8,16", help="requests, with commas between")
    parser.add_argument("--temps", default="0,0.8", help="with commas between")
    parser.add_argument("--deepest", type=int, default=8, help="drafts a round at most, default 8")
    parser.add_argument("--tokens", type=int, default=128, help="of each text, default 128")


def run(options: argparse.Namespace) -> int:
    screen, deepest = Screen(), values.whole("deepest", options.deepest, 1, 16)
    widths = [values.whole("at-once", width, 1, 64) for width in numbers("at-once", options.at_once, int)]
    prompts = mixed_tokens(max(widths))
    settings = choose_pair(settings_from({"ngrams": False, "memory": False})).settings
    with LocalCluster(progress=screen.show, memory=False, ngrams=False) as cluster:
        found: dict[float, list[Odds]] = {}
        for temp in numbers("temps", options.temps, float):
            sampling = SamplingParams(max_tokens=options.tokens, temp=temp, ignore_eos=True, seed=1)
            found[temp] = []
            for number, prompt in enumerate(prompts, 1):
                screen.show(f"T = {temp:g}: what is accepted in text {number} of {len(prompts)}")
                found[temp].append(accepted(cluster.client(), prompt, sampling, deepest))
    print("| T | at once | most over plain decoding | drafts a round | forwards, ms by rows |\n|---|---|---|---|---|")
    for width in widths:
        screen.show(f"{width} at once: forwards")
        costs = forward_costs(settings, width, range(deepest + 1))
        screen.clear()
        for temp, odds in found.items():
            # The prompts are of all classes in turn: each group of neighbours is a fair crowd.
            crowds = [odds[at : at + width] for at in range(0, len(odds) - width + 1, width)]
            best = [ceiling(crowd, costs.milliseconds) for crowd in crowds]
            gain, drafts = (statistics.fmean(getattr(one, name) for one in best) for name in ("gain", "drafts"))
            times = ", ".join(f"{rows}: {ms:.1f}" for rows, ms in costs.points)
            print(f"| {temp:g} | {width} | {gain:.2f} | {drafts:.1f} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
