"""Measures the effect of each constant of mode `auto` by simulation, so neither the machine nor its load matters.

    python -m tools.policy_constants                      # all of `PolicyConstants`, as a Markdown table
    python -m tools.policy_constants --only fade,optimism
    python -m tools.policy_constants --scenarios          # only the scenarios

A scenario is a machine, kinds of text and a sequence of requests (`SCENARIOS`). Its result is the time of the best
fixed arms over the time of `auto`; the best arm is chosen with hindsight for each kind of text and number of requests.
The table has, for each constant and other values of it, the change of the mean and of the worst scenario in points
(hundredths); if it is negative, the present value is better. A changed plan changes the random numbers of all later
rounds, so a change of the mean within two errors is not significant. `tools.simulation.auto_rounds` simulates the
rounds.
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

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.core import planner
from outrider.orchestrator.core.policy import acceptance, estimates, forecasts, policy
from outrider.orchestrator.core.policy.constants import POLICY, PolicyConstants
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning
from outrider.protocol import values
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import Abilities, InProcessDrafter
from tests.harness.settings import round_settings
from tools.latency import Latency
from tools.simulation.auto_rounds import DRAFT_WORKER, Machine, Server, Text, TextKind
from tools.simulation.profile import PROFILES, Profile

DEPTH, BRANCHES = 4, 16
MODULES = (acceptance, estimates, forecasts, policy, planner)


def read_profile(name: str) -> Profile:
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
LARGER_PAIR = Machine(
    Profile(
        "Qwen2.5-Coder 1.5B and 0.5B on two cores", ("docs/log/2026-11.md",),
        Latency(((1, 46.0), (2, 60.0), (3, 69.0), (5, 92.0), (8, 138.0), (16, 260.0), (64, 1000.0))),
        Latency(((1, 19.0), (4, 32.0), (8, 55.0), (16, 104.0), (64, 400.0))),
        0.1, (0.5,), (0.55, 0.15, 0.08, 0.05, 0.03, 0.02),
    ),
    all_cores=0.6,
)  # fmt: skip
DISTURBED_TWO_CORES = replace(TWO_CORES, noise=0.2, outlier=40)
HEADS_MACHINE = Machine(
    Profile(
        "heads", ("none",), Latency(((1, 10.2), (16, 21.0))), Latency(((1, 1.9), (16, 3.0))), 0.1, (0.6,),
        (0.5, 0.2, 0.1),
    ),
    in_process_ms={"eagle3": 1.0, "mtp": 1.0},
)  # fmt: skip
HEADLESS_MACHINE = replace(HEADS_MACHINE, in_process_ms={})
SLOW_HEADS_MACHINE = replace(HEADS_MACHINE, in_process_ms={"eagle3": 4.0, "mtp": 4.0})


def make_kinds(free: float, code: float, editing: float) -> tuple[TextKind, ...]:
    return (
        TextKind("free", {DRAFT_WORKER: free}, 0.05),
        TextKind("code", {DRAFT_WORKER: code}, 0.25, is_code_like=True),
        TextKind("editing", {DRAFT_WORKER: editing}, 0.7, 30.0),
    )


REAL_TEXTS = make_kinds(0.42, 0.57, 0.5)
SHARP_DRAFT_TEXTS = make_kinds(0.75, 0.85, 0.8)
LARGER_PAIR_TEXTS = make_kinds(0.7, 0.8, 0.8)
COPYING_TEXTS = (
    TextKind("free", {DRAFT_WORKER: 0.42}, 0.05),
    TextKind("extraction", {DRAFT_WORKER: 0.5}, 0.4, 6.0, prompt_repeats=False),
    TextKind("editing", {DRAFT_WORKER: 0.3}, 0.7, 12.0, prompt_repeats=False),
)
USELESS_DRAFT_TEXTS = (
    TextKind("free", {DRAFT_WORKER: 0.05}, 0.02),
    TextKind("code", {DRAFT_WORKER: 0.1}, 0.05, is_code_like=True),
)
HEAD_TEXTS = (
    TextKind("free", {DRAFT_WORKER: 0.55, "eagle3": 0.35, "mtp": 0.8}, 0.05),
    TextKind("code", {DRAFT_WORKER: 0.6, "eagle3": 0.85, "mtp": 0.45}, 0.3, is_code_like=True),
    TextKind("editing", {DRAFT_WORKER: 0.6, "eagle3": 0.5, "mtp": 0.5}, 0.8, 30.0),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The requests of a server: `concurrency` at once, of `tokens` tokens on average, one group after the other.

    `tuned`: its tuning ("": none, right or wrong); "memory": it has estimates of a machine with other costs.
    `drafter_slowdown`: how many times as long the drafter takes in the first and in the second half.
    `misleading_prompts`: half of the prompts look like code, independent of their kind.
    """

    name: str
    machine: Machine
    kinds: tuple[TextKind, ...]
    concurrency: tuple[int, ...] = (1,) * 14
    tokens: int = 96
    tuned: str = ""
    drafter_slowdown: tuple[float, float] = (1.0, 1.0)
    misleading_prompts: bool = False

    @property
    def own(self) -> tuple[InProcessDrafter, ...]:
        forward_ms = self.machine.profile.target(1)
        return tuple(
            InProcessDrafter(name, "", True, 0.6, weight=ms / forward_ms)
            for name, ms in self.machine.in_process_ms.items()
        )


MIXED_CONCURRENCY = (4, 1, 8, 2, 4, 1, 8)
SCENARIOS = (
    Scenario("two cores", TWO_CORES, REAL_TEXTS),
    Scenario("two cores, long texts", TWO_CORES, REAL_TEXTS, (1,) * 4, 400),
    Scenario("two cores, disturbed", DISTURBED_TWO_CORES, REAL_TEXTS),
    Scenario("two cores, useless draft", TWO_CORES, USELESS_DRAFT_TEXTS),
    Scenario("two cores, useless draft, disturbed", DISTURBED_TWO_CORES, USELESS_DRAFT_TEXTS),
    Scenario("two cores, tuned", TWO_CORES, REAL_TEXTS, tuned="right"),
    Scenario("two cores, tuned wrongly", TWO_CORES, REAL_TEXTS, tuned="wrong"),
    Scenario("two cores, useless draft, tuned wrongly", TWO_CORES, USELESS_DRAFT_TEXTS, tuned="wrong"),
    Scenario("two cores, other memory", TWO_CORES, REAL_TEXTS, tuned="memory"),
    Scenario("two cores, drafter slows", TWO_CORES, REAL_TEXTS, (1,) * 16, drafter_slowdown=(1.0, 5.0)),
    Scenario("two cores, drafter slow at first", TWO_CORES, REAL_TEXTS, (1,) * 16, drafter_slowdown=(5.0, 1.0)),
    Scenario("two cores, answers copy", TWO_CORES, COPYING_TEXTS, (1,) * 24),
    Scenario("two cores, answers copy, disturbed", DISTURBED_TWO_CORES, COPYING_TEXTS, (1,) * 24),
    Scenario("a larger pair on two cores", LARGER_PAIR, LARGER_PAIR_TEXTS, (1,) * 8),
    Scenario("two cores, several requests", TWO_CORES, REAL_TEXTS, MIXED_CONCURRENCY),
    Scenario("two cores, several requests, disturbed", DISTURBED_TWO_CORES, REAL_TEXTS, MIXED_CONCURRENCY),
    Scenario("two cores, useless draft, long texts", TWO_CORES, USELESS_DRAFT_TEXTS, (1,) * 12, 500),
    Scenario("four requests, drafter slow at first", HEADLESS_MACHINE, SHARP_DRAFT_TEXTS, (4,) * 8,
             drafter_slowdown=(12.0, 1.0)),
    Scenario("eight requests, nearly a tie", HEADLESS_MACHINE, make_kinds(0.42, 0.47, 0.42), (8,) * 5),
    Scenario("sharp draft, several requests", Machine(read_profile("verify-40ms")), SHARP_DRAFT_TEXTS,
             MIXED_CONCURRENCY),
    Scenario("H100", Machine(read_profile("h100-llama-70b")), SHARP_DRAFT_TEXTS, (1,) * 10, 128),
    Scenario("H100, four requests", Machine(read_profile("h100-qwen3-32b")), SHARP_DRAFT_TEXTS, (4,) * 5),
    Scenario("Mac, one GPU", Machine(read_profile("mac-8b-gpu")), SHARP_DRAFT_TEXTS),
    Scenario("Mac, ANE drafter", Machine(read_profile("mac-ane-gpu")), make_kinds(0.6, 0.75, 0.7), tuned="right"),
    Scenario("two Macs", Machine(read_profile("two-macs-ethernet")), SHARP_DRAFT_TEXTS),
    Scenario("heads", HEADS_MACHINE, HEAD_TEXTS, (1,) * 18),
    Scenario("expensive heads", SLOW_HEADS_MACHINE, HEAD_TEXTS, (1,) * 18),
    Scenario("heads, misleading prompts", HEADS_MACHINE, HEAD_TEXTS, (1,) * 40, misleading_prompts=True),
    Scenario("heads, tuned wrongly", HEADS_MACHINE, HEAD_TEXTS, (1,) * 18, tuned="wrong"),
)  # fmt: skip

Group = tuple[str, int, bool]
"""A kind of text, a number of requests, and whether it was in the second half."""


@dataclass(slots=True)
class ScenarioResult:
    """The milliseconds of a scenario by group, and the rounds by plan."""

    spent: defaultdict[Group, float] = field(default_factory=lambda: defaultdict(float))
    plans: Counter[Arm] = field(default_factory=Counter)
    learned: tuple[Tuning, ...] = ()


def run_scenario(
    scenario: Scenario,
    seed: int,
    plan: Arm | None = None,
    tunings: Sequence[Tuning] = (),
    memory: Sequence[Tuning] = (),
) -> ScenarioResult:
    """Runs a scenario with the policy or a fixed plan."""
    rng = random.Random(seed)
    abilities = Abilities(all_cores=scenario.machine.all_cores != 1, drafters=scenario.own)
    found = planner.Planner(round_settings(DEPTH, BRANCHES), tunings, memory, lambda: abilities)
    server = Server(scenario.machine, found, random.Random(seed + 1), plan)
    result = ScenarioResult(plans=server.plans)
    for number, at_once in enumerate(scenario.concurrency):
        second = number >= len(scenario.concurrency) / 2
        server.drafter_slowdown = scenario.drafter_slowdown[second]
        kind = rng.choice(scenario.kinds)
        if scenario.misleading_prompts:
            kind = replace(kind, is_code_like=rng.random() < 0.5)
        lengths = [round(scenario.tokens * rng.uniform(0.5, 1.5)) for _ in range(at_once)]
        texts = [Text(kind, scenario.machine.profile, length, rng) for length in lengths]
        group = kind.name, at_once, second and scenario.drafter_slowdown[0] != scenario.drafter_slowdown[1]
        result.spent[group] += server.play(texts, 4)
    if tunings == () and memory == () and plan is None:
        result.learned = found.learned()
    return result


def fixed_plans(scenario: Scenario) -> Iterator[Arm]:
    yield Arm("ar", 1)
    yield Arm("sd", DEPTH, BRANCHES, NGRAM)
    for depth in (1, 2, 4):
        yield Arm("sd", depth, BRANCHES)
        yield from (Arm("ssd", depth, breadth) for breadth in (4, 16))
        for own in scenario.machine.in_process_ms:
            yield Arm("sd", depth, BRANCHES, own)
            yield Arm("ssd", depth, BRANCHES, own)


@dataclass(frozen=True, slots=True)
class BestArms:
    """The best fixed arms of a scenario: their milliseconds by group, and the tunings and memory to start with."""

    best: Mapping[Group, float]
    tunings: tuple[Tuning, ...]
    memory: tuple[Tuning, ...]


def find_best_arms(scenario: Scenario, seed: int) -> BestArms:
    by_plan = {plan: run_scenario(scenario, seed, plan).spent for plan in fixed_plans(scenario)}
    best = {group: min(spent[group] for spent in by_plan.values()) for group in next(iter(by_plan.values()))}
    rates = {plan: 1000 / sum(spent.values()) for plan, spent in by_plan.items()}
    tunings: tuple[Tuning, ...] = ()
    memory: tuple[Tuning, ...] = ()
    if scenario.tuned in ("right", "wrong"):
        tunings = (_make_tuning(scenario, rates, scenario.tuned == "wrong"),)
    elif scenario.tuned == "memory":
        before = replace(scenario, tuned="", machine=replace(scenario.machine, all_cores=1.4), kinds=SHARP_DRAFT_TEXTS)
        memory = run_scenario(before, seed + 7).learned
    return BestArms(best, tunings, memory)


def _make_tuning(scenario: Scenario, rates: Mapping[Arm, float], wrong: bool) -> Tuning:
    """Returns a record of tune: rates off by 10 %, or, if `wrong`, the worst arms as the best and half the costs."""
    machine, tokens = scenario.machine.profile, 1000.0 * scenario.tokens * sum(scenario.concurrency) / 1000
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
        scale * machine.target(1) * scenario.machine.all_cores, rows, machine.draft(BRANCHES),
        machine.draft(1), 2 * machine.link_ms + 0.2, 0.3, machine.acceptance * DEPTH, 0.8,
        tuple(sorted(choices, key=lambda choice: -choice.tokens_per_second)),
    )  # fmt: skip


# --- constants --------------------------------------------------------------------------------------------------------

Task = tuple[PolicyConstants, int, int, BestArms]


def use_constants(changed: PolicyConstants) -> None:
    """Replaces the constants in this process."""
    for module in MODULES:
        module.POLICY = changed  # type: ignore[attr-defined]


def measure_scenario(task: Task) -> tuple[float, Counter[Arm]]:
    """Returns the share of the best arms' rate that `auto` reaches, and its plans."""
    changed, scenario, seed, known = task
    use_constants(changed)
    result = run_scenario(SCENARIOS[scenario], seed, None, known.tunings, known.memory)
    return sum(known.best.values()) / sum(result.spent.values()), result.plans


def _find_best_arms(place: tuple[int, int]) -> BestArms:
    return find_best_arms(SCENARIOS[place[0]], place[1])


def variants(name: str) -> Iterator[tuple[str, PolicyConstants]]:
    """Yields a description of each other value of a constant, and all constants with that value."""
    value = getattr(POLICY, name)
    doubled = (value // 2, value * 2) if isinstance(value, int) else (value / 2, value * 2)
    for other in OTHER_VALUES.get(name, doubled):
        yield f"{name}: {value:g} -> {other:g}", replace(POLICY, **{name: other})


# The test of each constant of fixed modes and of several draft workers, which no scenario has.
TESTED_CONSTANTS: Mapping[str, str] = {
    "max_silent_rounds": "tests/orchestrator/test_drafters.py",
    "latency_smoothing": "tests/orchestrator/test_drafter_latency.py",
    "drafter_trial_rounds": "tests/orchestrator/test_draft_pool.py",
    "breadth_interval_rounds": "tests/bench/test_simulator.py",
}

# Other values for constants where half and twice the value say less: mostly the value that disables the constant.
OTHER_VALUES: Mapping[str, Sequence[float]] = {
    "fade": (1.0,),
    "copy_fade": (0.99,),
    "prior_rate": (0.5, 0.85),
    "optimism": (1.0,),
    "repeated_share": (math.inf,),
    "min_repeat_pairs": (1,),
    "cost_per_row": (0.0,),
    "near": (1.0,),
    "episode_fade": (1.0,),
    "prior_weight_ms": (1e-6, 1000.0),
    "max_stall_factor": (math.inf,),
    "min_known_rounds": (0,),
    "max_wait_factor": (1,),
    "stay_margin": (1.0,),
    "error_half_life_episodes": (math.inf,),
    "promising": (0.0,),
    "unlikely": (1, 8),
    "patience": (6, 10**6),
}


class ScenarioMeasurer:
    """Measures all scenarios in parallel, each as the mean of the same seeds."""

    def __init__(self, pool: ProcessPoolExecutor, seeds: Sequence[int]) -> None:
        self._pool, self._seeds = pool, len(seeds)
        self._places = [(scenario, seed) for scenario in range(len(SCENARIOS)) for seed in seeds]
        self._known = list(pool.map(_find_best_arms, self._places))

    def __call__(self, changed: PolicyConstants) -> tuple[list[float], list[Counter[Arm]]]:
        """Returns the result of each scenario with these constants, and the plans of its rounds."""
        tasks = [(changed, *place, known) for place, known in zip(self._places, self._known, strict=True)]
        found = list(self._pool.map(measure_scenario, tasks))
        by_scenario = [found[at : at + self._seeds] for at in range(0, len(found), self._seeds)]
        return [fmean(rate for rate, _ in runs) for runs in by_scenario], [
            sum((p for _, p in r), Counter()) for r in by_scenario
        ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", metavar="NAMES", help="comma-separated constants (default: all)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="runs per scenario (default: 2)")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="parallel processes (default: 2)")
    scenarios = "only measure the scenarios with the present constants"
    parser.add_argument("--scenarios", "--scenes", dest="scenarios", action="store_true", help=scenarios)


def run(options: argparse.Namespace) -> int:
    seeds = [1000 * (1 + seed) for seed in range(values.check_int("seeds", options.seeds, 1, 100))]
    with ProcessPoolExecutor(options.processes) as pool:
        measure = ScenarioMeasurer(pool, seeds)
        base, plans = measure(POLICY)
        print("| scenario | share of the best arms' rate | plans |\n|---|---|---|")
        for scenario, rate, used in zip(SCENARIOS, base, plans, strict=True):
            print(f"| {scenario.name} | {rate:.3f} | {_format_plans(used)} |")
        print(f"| mean | {fmean(base):.3f} | |\n", flush=True)
        if not options.scenarios:
            every = [field.name for field in fields(PolicyConstants)]
            _print_changes(measure, base, options.only.split(",") if options.only else every)
    return 0


def _format_plans(plans: Counter[Arm]) -> str:
    """Returns the most used plans with their share of the rounds, as "mode drafter K/B"."""
    return ", ".join(
        f"{plan.mode}{' ' * bool(plan.drafter)}{plan.drafter} {plan.depth}/{plan.branches} {count / plans.total():.0%}"
        for plan, count in plans.most_common(3)
    )


def _print_changes(measure: ScenarioMeasurer, base: Sequence[float], names: Sequence[str]) -> None:
    print(
        "| constant: value -> other | mean +- error | worst scenario | loses most | gains most |\n|---|---|---|---|---|"
    )
    for name in names:
        if name in TESTED_CONSTANTS:
            print(f"| {name}: {getattr(POLICY, name):g} | no scenario | | {TESTED_CONSTANTS[name]} | |", flush=True)
            continue
        for text, changed in variants(name):
            rates, _ = measure(changed)
            change = [100 * (new - old) for new, old in zip(rates, base, strict=True)]
            by_change = sorted(zip(change, (scenario.name for scenario in SCENARIOS), strict=True))
            (loss, loser), (gain, winner) = by_change[0], by_change[-1]
            error = stdev(change) / math.sqrt(len(change))
            print(
                f"| {text} | {fmean(change):+.2f} +- {error:.2f} | {100 * (min(rates) - min(base)):+.1f} |"
                f" {loss:+.1f} {loser} | {gain:+.1f} {winner} |",
                flush=True,
            )


if __name__ == "__main__":
    raise SystemExit(run_as_program())
