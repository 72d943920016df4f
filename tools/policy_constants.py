"""Measures what each constant of `auto` is worth, in arithmetic: neither the machine nor its load matters.

    python -m tools.policy_constants                      # all of `PolicyConstants`, as a Markdown table
    python -m tools.policy_constants --only fade,optimism
    python -m tools.policy_constants --scenes             # the scenes alone

A scene is a machine, kinds of text and a sequence of requests (`SCENES`). Its result is the time of the best fixed arm
over the time of `auto`, the best arm being chosen for each kind of text and number of requests with knowledge of both.
The table has, for each constant and other values of it, the change of the mean and of the worst scene in points
(hundredths); negative: the constant is worth something. A change of plan changes the luck of all later rounds, so a
change of the mean within two errors means nothing. Rounds are those of `tools.simulation.auto_rounds`.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, stdev

from outrider.bench.timing import Latency
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.core import planner
from outrider.orchestrator.core.policy import acceptance, estimates, forecasts, policy
from outrider.orchestrator.core.policy.constants import POLICY, PolicyConstants
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning
from outrider.protocol import values
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import InProcessDrafter
from tests.harness.settings import round_settings
from tools.simulation.auto_rounds import WORKER, Kind, Machine, Server, Text
from tools.simulation.profile import PROFILES, Profile

DEPTH, BRANCHES = 4, 16
MODULES = (acceptance, estimates, forecasts, policy, planner)


def profile(name: str) -> Profile:
    return Profile.read(PROFILES / f"{name}.json")


TWO_CORES = Machine(
    Profile(
        "SmolLM2 on two cores", ("docs/log/2026-11.md",),
        Latency(((1, 10.4), (2, 12.2), (3, 13.5), (4, 15.6), (8, 25.0), (16, 46.0), (64, 170.0))),
        Latency(((1, 1.6), (4, 2.9), (8, 4.8), (16, 9.0), (64, 33.0))),
        0.1, (0.5,), (0.35, 0.15, 0.08, 0.05, 0.03, 0.02),
    ),
    all_cores=0.76,
)  # fmt: skip
DISTURBED = replace(TWO_CORES, noise=0.2, outlier=40)
HEADS = Machine(
    Profile(
        "heads", ("none",), Latency(((1, 10.2), (16, 21.0))), Latency(((1, 1.9), (16, 3.0))), 0.1, (0.6,),
        (0.5, 0.2, 0.1),
    ),
    own_ms={"eagle3": 1.0, "mtp": 1.0},
)  # fmt: skip
HEADLESS = replace(HEADS, own_ms={})
DEAR_HEADS = replace(HEADS, own_ms={"eagle3": 4.0, "mtp": 4.0})


def kinds(free: float, code: float, editing: float) -> tuple[Kind, ...]:
    return (
        Kind("free", {WORKER: free}, 0.05),
        Kind("code", {WORKER: code}, 0.25, looks_code=True),
        Kind("editing", {WORKER: editing}, 0.7, 30.0),
    )


REAL = kinds(0.42, 0.57, 0.5)
SHARP = kinds(0.75, 0.85, 0.8)
ANSWERS = (
    Kind("free", {WORKER: 0.42}, 0.05),
    Kind("extraction", {WORKER: 0.5}, 0.4, 6.0, shows=False),
    Kind("editing", {WORKER: 0.3}, 0.7, 12.0, shows=False),
)
USELESS = (Kind("free", {WORKER: 0.05}, 0.02), Kind("code", {WORKER: 0.1}, 0.05, looks_code=True))
BY_HEADS = (
    Kind("free", {WORKER: 0.55, "eagle3": 0.35, "mtp": 0.8}, 0.05),
    Kind("code", {WORKER: 0.6, "eagle3": 0.85, "mtp": 0.45}, 0.3, looks_code=True),
    Kind("editing", {WORKER: 0.6, "eagle3": 0.5, "mtp": 0.5}, 0.8, 30.0),
)


@dataclass(frozen=True, slots=True)
class Scene:
    """A server's life: `crowds` of requests of `tokens` on average, one after the other.

    `tuned`: its tuning ("": none, right or wrong); "memory": it learned from other costs before. `work`: how many times
    as long the drafter's work takes in the first and in the second half. `misleads`: half of the prompts look like
    code, whatever they are.
    """

    name: str
    machine: Machine
    kinds: tuple[Kind, ...]
    crowds: tuple[int, ...] = (1,) * 14
    tokens: int = 96
    tuned: str = ""
    work: tuple[float, float] = (1.0, 1.0)
    misleads: bool = False

    @property
    def own(self) -> tuple[InProcessDrafter, ...]:
        forward_ms = self.machine.profile.target(1)
        return tuple(
            InProcessDrafter(name, "", True, 0.6, weight=ms / forward_ms) for name, ms in self.machine.own_ms.items()
        )


MIXED = (4, 1, 8, 2, 4, 1, 8)
SCENES = (
    Scene("two cores", TWO_CORES, REAL),
    Scene("two cores, long texts", TWO_CORES, REAL, (1,) * 4, 400),
    Scene("two cores, disturbed", DISTURBED, REAL),
    Scene("two cores, useless draft", TWO_CORES, USELESS),
    Scene("two cores, useless draft, disturbed", DISTURBED, USELESS),
    Scene("two cores, tuned", TWO_CORES, REAL, tuned="right"),
    Scene("two cores, tuned wrongly", TWO_CORES, REAL, tuned="wrong"),
    Scene("two cores, useless draft, tuned wrongly", TWO_CORES, USELESS, tuned="wrong"),
    Scene("two cores, other memory", TWO_CORES, REAL, tuned="memory"),
    Scene("two cores, drafter slows", TWO_CORES, REAL, (1,) * 16, work=(1.0, 5.0)),
    Scene("two cores, drafter slow at first", TWO_CORES, REAL, (1,) * 16, work=(5.0, 1.0)),
    Scene("two cores, answers copy", TWO_CORES, ANSWERS, (1,) * 24),
    Scene("two cores, answers copy, disturbed", DISTURBED, ANSWERS, (1,) * 24),
    Scene("two cores, crowds", TWO_CORES, REAL, MIXED),
    Scene("two cores, crowds, disturbed", DISTURBED, REAL, MIXED),
    Scene("two cores, useless draft, long life", TWO_CORES, USELESS, (1,) * 12, 500),
    Scene("four at once, drafter slow at first", HEADLESS, SHARP, (4,) * 8, work=(12.0, 1.0)),
    Scene("eight at once, nearly a tie", HEADLESS, kinds(0.42, 0.47, 0.42), (8,) * 5),
    Scene("sharp draft, crowds", Machine(profile("verify-40ms")), SHARP, MIXED),
    Scene("H100", Machine(profile("h100-llama-70b")), SHARP, (1,) * 10, 128),
    Scene("H100, four at once", Machine(profile("h100-qwen3-32b")), SHARP, (4,) * 5),
    Scene("Mac, one GPU", Machine(profile("mac-8b-gpu")), SHARP),
    Scene("Mac, ANE drafter", Machine(profile("mac-ane-gpu")), kinds(0.6, 0.75, 0.7), tuned="right"),
    Scene("two Macs", Machine(profile("two-macs-ethernet")), SHARP),
    Scene("heads", HEADS, BY_HEADS, (1,) * 18),
    Scene("dear heads", DEAR_HEADS, BY_HEADS, (1,) * 18),
    Scene("heads, misleading prompts", HEADS, BY_HEADS, (1,) * 40, misleads=True),
    Scene("heads, tuned wrongly", HEADS, BY_HEADS, (1,) * 18, tuned="wrong"),
)  # fmt: skip

Group = tuple[str, int, bool]
"""A kind of text, a number of requests, and whether it was in the second half."""


@dataclass(slots=True)
class Played:
    """The milliseconds of a scene by group, and the rounds by plan."""

    spent: defaultdict[Group, float] = field(default_factory=lambda: defaultdict(float))
    plans: Counter[Arm] = field(default_factory=Counter)
    learned: tuple[Tuning, ...] = ()


def play(
    scene: Scene, seed: int, plan: Arm | None = None, tunings: Sequence[Tuning] = (), memory: Sequence[Tuning] = ()
) -> Played:
    """Plays a scene under the policy or a fixed plan."""
    luck = random.Random(seed)
    found = planner.Planner(round_settings(DEPTH, BRANCHES), tunings, memory, own=lambda: scene.own)
    server = Server(scene.machine, found, random.Random(seed + 1), plan)
    played = Played(plans=server.plans)
    for number, at_once in enumerate(scene.crowds):
        second = number >= len(scene.crowds) / 2
        server.slower = scene.work[second]
        kind = luck.choice(scene.kinds)
        if scene.misleads:
            kind = replace(kind, looks_code=luck.random() < 0.5)
        lengths = [round(scene.tokens * luck.uniform(0.5, 1.5)) for _ in range(at_once)]
        texts = [Text(kind, scene.machine.profile, length, luck) for length in lengths]
        played.spent[kind.name, at_once, second and scene.work[0] != scene.work[1]] += server.play(texts, 4)
    if tunings == () and memory == () and plan is None:
        played.learned = found.learned()
    return played


def fixed_plans(scene: Scene) -> Iterator[Arm]:
    yield Arm("ar", 1)
    yield Arm("sd", DEPTH, BRANCHES, NGRAM)
    for depth in (1, 2, 4):
        yield Arm("sd", depth, BRANCHES)
        yield from (Arm("ssd", depth, breadth) for breadth in (4, 16))
        for own in scene.machine.own_ms:
            yield Arm("sd", depth, BRANCHES, own)
            yield Arm("ssd", depth, BRANCHES, own)


@dataclass(frozen=True, slots=True)
class Standard:
    """The best fixed arms of a scene: their milliseconds by group, and what a tuning says."""

    best: Mapping[Group, float]
    tunings: tuple[Tuning, ...]
    memory: tuple[Tuning, ...]


def standard(scene: Scene, seed: int) -> Standard:
    played = {plan: play(scene, seed, plan).spent for plan in fixed_plans(scene)}
    best = {group: min(spent[group] for spent in played.values()) for group in next(iter(played.values()))}
    rates = {plan: 1000 / sum(spent.values()) for plan, spent in played.items()}
    tunings: tuple[Tuning, ...] = ()
    memory: tuple[Tuning, ...] = ()
    if scene.tuned in ("right", "wrong"):
        tunings = (_tuning(scene, rates, scene.tuned == "wrong"),)
    elif scene.tuned == "memory":
        before = replace(scene, tuned="", machine=replace(scene.machine, all_cores=1.4), kinds=SHARP)
        memory = play(before, seed + 7).learned
    return Standard(best, tunings, memory)


def _tuning(scene: Scene, rates: Mapping[Arm, float], wrong: bool) -> Tuning:
    """Returns tune's record: rates that err by 10 %, or those of the worst arms as the best, and half the costs."""
    machine, tokens = scene.machine.profile, 1000.0 * scene.tokens * sum(scene.crowds) / 1000
    by_mode: dict[str, tuple[float, Arm]] = {}
    for plan, rate in rates.items():
        if plan.drafter == "":
            ahead = by_mode.get(plan.mode)
            if ahead is None or (rate < ahead[0]) == wrong:
                by_mode[plan.mode] = rate, plan
    errors = {"ar": 0.9, "sd": 1.1, "ssd": 0.95}
    fastest, slowest = max(r for r, _ in by_mode.values()), min(r for r, _ in by_mode.values())
    choices = [
        TunedArm(plan.mode, 0 if plan.mode == "ar" else plan.depth, plan.branches if plan.mode == "ssd" else 0,
                 tokens * (fastest * slowest / rate * 1.3 if wrong else rate * errors[mode]))
        for mode, (rate, plan) in by_mode.items()
    ]  # fmt: skip
    scale = 0.5 if wrong else 1.0
    rows = tuple((m, scale * machine.target(m)) for m in range(1, 9))
    return Tuning(
        scale * machine.target(1) * scene.machine.all_cores, rows, machine.draft(BRANCHES),
        machine.draft(1), 2 * machine.link_ms + 0.2, 0.3, machine.acceptance * DEPTH, 0.8,
        tuple(sorted(choices, key=lambda choice: -choice.tokens_per_second)),
    )  # fmt: skip


# --- constants --------------------------------------------------------------------------------------------------------

Task = tuple[PolicyConstants, int, int, Standard]


def use(changed: PolicyConstants) -> None:
    """Replaces the constants in this process."""
    for module in MODULES:
        module.POLICY = changed  # type: ignore[attr-defined]


def result(task: Task) -> tuple[float, Counter[Arm]]:
    """Returns the share of the best arms' rate that `auto` reaches, and its plans."""
    changed, scene, seed, known = task
    use(changed)
    played = play(SCENES[scene], seed, None, known.tunings, known.memory)
    return sum(known.best.values()) / sum(played.spent.values()), played.plans


def _standard(place: tuple[int, int]) -> Standard:
    return standard(SCENES[place[0]], place[1])


def variants(name: str) -> Iterator[tuple[str, PolicyConstants]]:
    """Yields other values of a constant, as text and in place."""
    value = getattr(POLICY, name)
    doubled = (value // 2, value * 2) if isinstance(value, int) else (value / 2, value * 2)
    for other in NEUTRAL.get(name, doubled):
        yield f"{name}: {value:g} -> {other:g}", replace(POLICY, **{name: other})


# Constants of fixed modes and of several draft workers, which no scene has: the test that holds each.
HELD_BY_TESTS: Mapping[str, str] = {
    "silent_rounds": "tests/orchestrator/test_drafters.py",
    "judged_tokens": "tests/orchestrator/test_drafters.py",
    "least_use": "tests/orchestrator/test_drafters.py",
    "latency_smoothing": "tests/orchestrator/test_drafter_latency.py",
    "drafter_trial_rounds": "tests/orchestrator/test_draft_pool.py",
    "breadth_rounds": "tests/bench/test_simulator.py",
}

# What a constant is replaced by where half and twice of it say less: mostly the value at which it does nothing.
NEUTRAL: Mapping[str, Sequence[float]] = {
    "fade": (1.0,),
    "copy_fade": (0.99,),
    "prior_rate": (0.5, 0.85),
    "optimism": (1.0,),
    "repeated_share": (math.inf,),
    "repeat_least": (1,),
    "kind_doubt": (math.inf,),
    "prior_spread": (1e-3,),
    "cost_per_row": (0.0,),
    "near": (1.0,),
    "episode_fade": (1.0,),
    "belief_ms": (1e-6, 1000.0),
    "held_up": (math.inf,),
    "known_rounds": (0,),
    "longest_wait": (1,),
    "stay_margin": (1.0,),
    "half_forgotten": (math.inf,),
    "promising": (0.0,),
    "unlikely": (1, 8),
    "patience": (6, 10**6),
}


class Measure:
    """Measures all scenes in parallel, each as the mean of the same seeds."""

    def __init__(self, pool: ProcessPoolExecutor, seeds: Sequence[int]) -> None:
        self._pool, self._seeds = pool, len(seeds)
        self._places = [(scene, seed) for scene in range(len(SCENES)) for seed in seeds]
        self._known = list(pool.map(_standard, self._places))

    def __call__(self, changed: PolicyConstants) -> tuple[list[float], list[Counter[Arm]]]:
        """Returns the result of each scene with these constants, and the plans of its rounds."""
        tasks = [(changed, *place, known) for place, known in zip(self._places, self._known, strict=True)]
        found = list(self._pool.map(result, tasks))
        by_scene = [found[at : at + self._seeds] for at in range(0, len(found), self._seeds)]
        return [fmean(rate for rate, _ in runs) for runs in by_scene], [
            sum((p for _, p in r), Counter()) for r in by_scene
        ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="NAMES", help="these constants, with commas (default: all)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    parser.add_argument("--scenes", action="store_true", help="only the scenes with today's constants")


def run(options: argparse.Namespace) -> int:
    seeds = [1000 * (1 + seed) for seed in range(values.whole("seeds", options.seeds, 1, 100))]
    with ProcessPoolExecutor(options.processes) as pool:
        measure = Measure(pool, seeds)
        base, plans = measure(POLICY)
        print("| scene | share of the best arms' rate | plans |\n|---|---|---|")
        for scene, rate, used in zip(SCENES, base, plans, strict=True):
            print(f"| {scene.name} | {rate:.3f} | {_most_used(used)} |")
        print(f"| mean | {fmean(base):.3f} | |\n", flush=True)
        if not options.scenes:
            _print_changes(measure, base, options.only.split(",") if options.only else _names())
    return 0


def _names() -> list[str]:
    return [field.name for field in fields(PolicyConstants)]


def _most_used(plans: Counter[Arm]) -> str:
    """Returns the most used plans with their share of the rounds, as "mode drafter K/B"."""
    return ", ".join(
        f"{plan.mode}{' ' * bool(plan.drafter)}{plan.drafter} {plan.depth}/{plan.branches} {count / plans.total():.0%}"
        for plan, count in plans.most_common(3)
    )


def _print_changes(measure: Measure, base: Sequence[float], names: Sequence[str]) -> None:
    print("| constant: value -> other | mean +- error | worst scene | lost most | won most |\n|---|---|---|---|---|")
    for name in names:
        if name in HELD_BY_TESTS:
            print(f"| {name}: {getattr(POLICY, name):g} | no scene | | {HELD_BY_TESTS[name]} | |", flush=True)
            continue
        for text, changed in variants(name):
            rates, _ = measure(changed)
            change = [100 * (new - old) for new, old in zip(rates, base, strict=True)]
            by_change = sorted(zip(change, (scene.name for scene in SCENES), strict=True))
            (lost, loser), (won, winner) = by_change[0], by_change[-1]
            error = stdev(change) / math.sqrt(len(change))
            print(
                f"| {text} | {fmean(change):+.2f} +- {error:.2f} | {100 * (min(rates) - min(base)):+.1f} |"
                f" {lost:+.1f} {loser} | {won:+.1f} {winner} |",
                flush=True,
            )


if __name__ == "__main__":
    raise SystemExit(run_as_program())
