"""Prints the gain of each change of the paper's policy on the machine of a profile, computed by `simulator.py`.

python -m tools.policies tools/simulation/profiles/*.json
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from outrider.orchestrator.cli import run_as_program
from tools.simulation.profile import Profile
from tools.simulation.simulator import Policy, Result, Simulator

RESULT_TOKENS = 30_000
SEARCH_TOKENS = 6_000
DEPTHS = range(1, 13)
BRANCHES = (4, 6, 8, 10, 12, 15, 16, 20, 24, 28, 32, 40, 48)
STEPS = (
    ("best-first fan-out", {"fan_out": "best-first"}),
    ("the best fallback after a miss", {"adaptive_fallback": True}),
    ("branches that are not complete", {"anytime": True}),
    ("waits for branches that are still to arrive", {"branch_waits": True}),
)


def table(profile: Profile) -> str:
    """Returns a Markdown table: AR, SD at the published and its best K, the paper's policy, and ours step by step."""
    fastest_sd, published = find_best_sd(profile), profile.published
    sd = Policy("sd", published.sd_depth) if published else fastest_sd
    depth, branches = (published.ssd_depth, published.branches) if published else (fastest_sd.depth, 10)
    policy = Policy("ssd", depth, branches, "geometric", anytime=False, adaptive_fallback=False, branch_waits=False)
    rows = [("AR", Policy("ar")), (f"SD K={sd.depth}", sd), (f"SD K={fastest_sd.depth}, its best", fastest_sd)]
    rows.append((f"SSD K={depth} B={branches}, the paper's policy", policy))
    for name, change in STEPS:
        policy = replace(policy, **change)
        rows.append((f"+ {name}", policy))
    policy = find_best_ssd(profile, policy)
    rows.append((f"+ best K={policy.depth} B={policy.branches}", policy))
    results = [(name, Simulator(profile, policy).run(RESULT_TOKENS)) for name, policy in rows]
    sd_rate, best_rate = results[1][1].tokens_per_second, results[2][1].tokens_per_second
    titles = "| | tok/s | / SD | / best SD | hit rate | tokens per round | round ms |"
    lines = [profile.name, "", titles, f"|{'---|' * 7}"]
    return "\n".join([*lines, *(_line(name, result, sd_rate, best_rate) for name, result in results)])


def find_best_sd(profile: Profile) -> Policy:
    return max((Policy("sd", depth) for depth in DEPTHS), key=lambda policy: _rate(profile, policy))


def find_best_ssd(profile: Profile, like: Policy) -> Policy:
    """Returns the policy `like` with its best K and B."""
    found = (replace(like, depth=depth, branches=branches) for depth in DEPTHS for branches in BRANCHES)
    return max(found, key=lambda policy: _rate(profile, policy))


def _rate(profile: Profile, policy: Policy) -> float:
    return Simulator(profile, policy).run(SEARCH_TOKENS).tokens_per_second


def _line(name: str, result: Result, sd_rate: float, best_rate: float) -> str:
    rate, hits = result.tokens_per_second, f"{result.hit_rate:.2f}" if result.hit_rate else ""
    return (
        f"| {name} | {rate:.1f} | {rate / sd_rate:.2f} | {rate / best_rate:.2f} | {hits} |"
        f" {result.tokens_per_round:.2f} | {result.round_ms:.2f} |"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE", help="latency profile")


def run(options: argparse.Namespace) -> int:
    for path in options.profiles:
        print(table(Profile.read(path)) + "\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
