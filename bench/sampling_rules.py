"""Coupled against residual sampling against mlx-lm's sample-match, on the embedded pair: a Markdown table.

    python -m outrider.bench.sampling_rules                          # about three minutes
    python -m outrider.bench.sampling_rules --prompts 24 --tokens 128 --speed-prompts 24 --saguaro 1 0.8 0.6 0.4 0.2

Acceptance and foreseen bonus tokens are measured offline (`rules.py`). From them, for chains of K: the tokens a round,
and the share of outcomes that F branches a place foresee. Tokens per second are of real processes: `ssd` with K and B,
drafts by the model alone, and mlx-lm's speculative decoding for sample-match. C below 1 is swept where T is above 0.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.contest.contest import Contestant, Ours, Peer, PeerProcess, compete
from outrider.bench.contest.statistics import total_rate
from outrider.bench.embedded import mixed_tokens
from outrider.bench.helper import Helper
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.screen import Screen
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pair.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.orchestrator.pair.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.sampling import SamplingParams

Tell = Callable[[str], None]
SWEPT_ABOVE = 0.5


@dataclass(frozen=True, slots=True)
class Setup:
    """What is measured, and on how much text; `fan_out` is F, the branches a place."""

    depth: int
    branches: int
    fan_out: int
    q_width: int
    saguaro: tuple[float, ...]
    prompts: int
    tokens: int
    speed_prompts: int

    def factors(self, temp: float) -> tuple[float, ...]:
        return self.saguaro if temp > SWEPT_ABOVE else (1.0,)


@dataclass(frozen=True, slots=True)
class Row:
    """One rule at one temperature: shares from 0 to 1, and tokens per second where they were measured."""

    accepted: float
    foreseen: float
    foreseen_full: float
    speed: float | None = None

    def tokens_a_round(self, depth: int) -> float:
        return sum(self.accepted**i for i in range(depth + 1))

    def hit_rate(self, depth: int) -> float:
        whole: float = self.accepted**depth
        return (1 - whole) * self.foreseen + whole * self.foreseen_full


def offline(setup: Setup, temps: Sequence[float], tell: Tell) -> dict[float, dict[str, Row]]:
    prompts = mixed_tokens(setup.prompts)
    models = ("--model", str(EMBEDDED_TARGET), "--draft-model", str(EMBEDDED_DRAFT))
    found = {}
    with Helper("outrider.bench.rules", *models) as rules:
        for temp in temps:
            sums: dict[str, dict[str, int]] = {}
            for number, tokens in enumerate(prompts):
                tell(f"T={temp:g}: text {number + 1} of {len(prompts)}")
                asked = {
                    "tokens": tokens,
                    "max_tokens": setup.tokens,
                    "temp": temp,
                    "seed": number,
                    "fan_out": setup.fan_out,
                    "saguaro": setup.factors(temp),
                    "q_width": setup.q_width,
                }
                for rule, tally in rules.ask(asked).items():
                    known = sums.setdefault(rule, dict.fromkeys(tally, 0))
                    sums[rule] = {name: known[name] + count for name, count in tally.items()}
            found[temp] = {rule: _row(tally) for rule, tally in sums.items()}
    return found


def _row(tally: dict[str, int]) -> Row:
    rejected = tally["places"] - tally["accepted"]
    return Row(
        tally["accepted"] / tally["places"],
        tally["foreseen"] / max(rejected, 1),
        tally["foreseen_full"] / tally["places"],
    )


def speeds(setup: Setup, temps: Sequence[float], tell: Tell) -> dict[float, dict[str, float]]:
    """Tokens per second by rule, all rules in turns on every prompt."""
    settings = ServeSettings()
    prompts = mixed_tokens(setup.speed_prompts)
    found = {}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(progress=tell, ngrams=False, memory=False))
        peers = stack.enter_context(PeerProcess(choose_pair(settings).settings))
        for temp in temps:
            field = _field(setup, temp, cluster, peers)
            compete(field, prompts[:1], SamplingParams(max_tokens=16, temp=temp, ignore_eos=True), tell)  # warms up
            sampling = SamplingParams(max_tokens=setup.tokens, temp=temp, ignore_eos=True)
            runs = compete(field, prompts, sampling, tell)
            found[temp] = {name: total_rate([run.timed for run in own]) for name, own in runs.items()}
    return found


def _field(setup: Setup, temp: float, cluster: LocalCluster, peers: PeerProcess) -> list[Contestant]:
    def ours(name: str, **sampling: Any) -> Ours:
        own = {"q_width": setup.q_width, **sampling}
        return Ours(name, cluster.client(), "ssd", setup.depth, setup.branches, own)

    field: list[Contestant] = [ours("coupled" if temp else "greedy")]
    for factor in setup.factors(temp) if temp else ():
        name = "residual" if factor == 1 else f"residual, C = {factor:g}"
        field.append(ours(name, rule="residual", saguaro=factor))
    return [*field, Peer("sample-match", peers, setup.depth)]


def table(setup: Setup, found: dict[float, dict[str, Row]]) -> str:
    lines = [
        f"| T | rule | accepted | tokens a round, K = {setup.depth} | foreseen, F = {setup.fan_out}: after a rejection"
        f" | after a whole chain | hits | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for temp, rows in found.items():
        for rule, row in rows.items():
            speed = f"{row.speed:.0f}" if row.speed else ""
            lines.append(
                f"| {temp:g} | {rule} | {row.accepted:.3f} | {row.tokens_a_round(setup.depth):.2f} | {row.foreseen:.2f}"
                f" | {row.foreseen_full:.2f} | {row.hit_rate(setup.depth):.2f} | {speed} |"
            )
    return "\n".join(lines)


def measured(setup: Setup, temps: Sequence[float], tell: Tell) -> dict[float, dict[str, Row]]:
    found = offline(setup, temps, tell)
    if not setup.speed_prompts:
        return found
    rates = speeds(setup, temps, tell)
    for temp, rows in found.items():
        for rule, rate in rates[temp].items():
            # Greedy, mlx-lm accepts as we do; its speed stands in a row of its own all the same.
            known = rows[rule if rule in rows else "greedy"]
            rows[rule] = replace(known, speed=rate)
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--temps", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0])
    parser.add_argument("--saguaro", type=float, nargs="+", default=[1.0, 0.7, 0.4], metavar="C")
    parser.add_argument("--depth", type=int, default=4, help="K")
    parser.add_argument("--branches", type=int, default=ServeSettings().breadth, help="B, of the speeds")
    parser.add_argument("--fan-out", type=int, default=3, help="F, of the foreseen bonus tokens")
    parser.add_argument("--q-width", type=int, default=SamplingParams().q_width, help="m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--speed-prompts", type=int, default=4, help="0: no speeds")


def run(options: argparse.Namespace) -> int:
    setup = Setup(
        options.depth, options.branches, options.fan_out, options.q_width, tuple(options.saguaro), options.prompts,
        options.tokens, options.speed_prompts,
    )  # fmt: skip
    screen = Screen()
    found = measured(setup, options.temps, screen.show)
    screen.clear()
    places, timed = setup.prompts * setup.tokens, setup.speed_prompts * setup.tokens
    print(f"{places} places a temperature, m = {setup.q_width}; B = {setup.branches}, {timed} tokens timed a rule\n")
    print(table(setup, found))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
