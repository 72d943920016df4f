"""How often the outcome was prepared for, against what a drafter with all the time in the world would have prepared.

    python -m outrider.bench.hit_rate         # K = 4, B = 12, T = 0 and 1, 24 prompts x 128 tokens: some minutes
    python -m outrider.bench.hit_rate --prompts 4 --tokens 64

The texts are made in `ssd` by the embedded pair in real processes, drafts by the model alone. Then the oracle
goes through the very same rounds with the same fan-out and budget, each on a fresh tree. What it covers and the
live run did not came too late or went wrong. The exit code is 1 when a ratio lies under --least.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.contest.statistics import bootstrap
from outrider.bench.embedded import embedded_codec
from outrider.bench.helper import Helper
from outrider.bench.prompts import mixed
from outrider.bench.trace.rounds import TracedRound, read_rounds
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT
from outrider.orchestrator.settings import FAN_OUTS
from outrider.protocol.sampling import SamplingParams

Tell = Callable[[str], None]
SEEN_AFTER = ("start", "hit", "miss")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured, and on how much text."""

    depth: int
    branches: int
    fan_out: str
    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """One outcome: was its branch there, would the oracle have had it, and what the round it ended had come after."""

    live: bool
    oracle: bool
    after: str


@dataclass(frozen=True, slots=True)
class Generated:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    sampling: SamplingParams


def generate(setup: Setup, temp: float, trace: Path, tell: Tell) -> list[Generated]:
    codec = embedded_codec()
    made = []
    with LocalCluster(
        progress=tell,
        trace=trace,
        ngrams=False,
        num_draft_tokens=setup.depth,
        branches=setup.branches,
        fan_out=setup.fan_out,
    ) as cluster:
        client = cluster.client()
        for number, prompt in enumerate(mixed(setup.prompts)):
            tell(f"T={temp:g}: {prompt.name}, {number + 1} of {setup.prompts}")
            sampling = SamplingParams(max_tokens=setup.tokens, temp=temp, ignore_eos=True, seed=number)
            tokens = codec.encode(prompt.text)
            made.append(Generated(tokens, client.generate(tokens, sampling, mode="ssd").token_ids, sampling))
    return made


def covers(oracle: Helper, text: Generated, round_: TracedRound, setup: Setup) -> bool:
    """Whether the oracle would have prepared for the round's outcome."""
    asked = {
        "tokens": [*text.prompt, *text.tokens][: round_.base_len],
        "chain": round_.chain,
        "accepted": round_.accepted,
        "bonus": round_.bonus,
        "branches": setup.branches,
        "temp": text.sampling.temp,
        "seed": text.sampling.seed,
    }
    return bool(oracle.ask(asked)["covered"])


def measure(setup: Setup, temp: float, tell: Tell) -> list[list[Lookup]]:
    """The lookups of each prompt's text."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        made = generate(setup, temp, trace, tell)
        rounds = read_rounds(trace, [(text.prompt, text.tokens) for text in made])
    found = []
    with Helper("outrider.bench.oracle", "--model", str(EMBEDDED_DRAFT), "--fan-out", setup.fan_out) as oracle:
        for number, (text, own) in enumerate(zip(made, rounds, strict=True), start=1):
            tell(f"T={temp:g}: the oracle goes through text {number} of {len(made)}")
            judged = [(round_, covers(oracle, text, round_, setup)) for round_ in own]
            found.append([Lookup(r.next_hit, seen, r.after) for r, seen in judged if r.next_hit is not None])
    return found


def told(temp: float, texts: Sequence[Sequence[Lookup]]) -> list[str]:
    """The lines of the table for one temperature: all lookups, then by what their round had come after."""
    lines = []
    for after in ("all", *SEEN_AFTER):
        chosen = [[lookup for lookup in text if after in ("all", lookup.after)] for text in texts]
        lookups = [lookup for text in chosen for lookup in text]
        if lookups:
            live, best = sum(x.live for x in lookups), sum(x.oracle for x in lookups)
            cells = f"{len(lookups):7}  {live / len(lookups):6.3f}  {best / len(lookups):6.3f}"
            spread = bootstrap([text for text in chosen if text], ratio)
            lines.append(f"{temp:<4g}  {after:<6}{cells}  {spread.value:6.3f} [{spread.low:.3f}, {spread.high:.3f}]")
    return lines


def ratio(texts: Sequence[Sequence[Lookup]]) -> float:
    """Live hits over the oracle's."""
    return sum(x.live for text in texts for x in text) / max(sum(x.oracle for text in texts for x in text), 1)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--depth", type=int, default=4, help="K")
    parser.add_argument("--branches", type=int, default=12, help="B")
    parser.add_argument("--fan-out", choices=FAN_OUTS, default="best-first")
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--least", type=float, default=0.95, help="the ratio to the oracle that is asked for")


def run(options: argparse.Namespace) -> int:
    setup = Setup(options.depth, options.branches, options.fan_out, options.prompts, options.tokens)
    screen = Screen()
    lines = ["T     after  lookups    live  oracle  live / oracle, 95 % by prompts"]
    enough = True
    for temp in options.temps:
        texts = measure(setup, temp, screen.show)
        lines += told(temp, texts)
        enough = enough and ratio(texts) >= options.least
    screen.clear()
    print(f"K={setup.depth} B={setup.branches} {setup.fan_out}, {setup.prompts} prompts x {setup.tokens} tokens")
    print("\n".join(lines))
    return 0 if enough else 1


if __name__ == "__main__":
    raise SystemExit(run_as_program())
