"""Runs AR, SD and SSD on a profile's machine in real processes, and compares them with published and predicted rates.

    python -m tools.simulate tools/simulation/profiles/h100-llama-70b.json --prompts 12 --max-tokens 400

The target is a small stand-in that sleeps for the profile's times; the drafter replays the target's own text with the
profile's acceptance and bonus ranks. Processes, sockets, messages, rounds, work ahead, fan-out and fallback are real. A
run fails if the real work takes longer than the simulated time. `ideal` is the rate of `simulator.py` with messages
that take no time beyond the profile's link, `predicted` with the measured median turnaround.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from outrider.bench.comparison.runs import Interval, Run, ratio, summarize, total_rate
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.flags import ensure_writable
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol import values
from outrider.protocol.sampling import SamplingParams
from tools.policies import find_best_sd, find_best_ssd
from tools.simulation.environment import simulated_machine
from tools.simulation.profile import Profile, Published
from tools.simulation.script import random_prompts, write_model_and_script
from tools.simulation.simulator import Policy, Simulator
from tools.turnarounds import TurnaroundRunner, median_turnaround

WARM_UP_TOKENS = 300
PREDICTED_TOKENS = 40_000
COLUMNS = (
    "tok/s", "predicted", "ideal", "published", "/ SD [95 %]", "/ AR", "hit rate", "tokens per round", "idle ms",
    "turnaround ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contestant:
    """A named policy to run. In `mode` auto the planner chooses."""

    name: str
    policy: Policy
    mode: str

    @property
    def cluster(self) -> tuple[str, bool]:
        """The settings of its cluster: fan-out, and whether branches are used as deep as they are."""
        return self.policy.fan_out, self.policy.anytime


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """The results of a contestant; rates in tokens per second, times in milliseconds per round."""

    name: str
    measured: float
    predicted: float | None
    ideal: float | None
    published: float | None
    hit_rate: float
    tokens_per_round: float
    idle_ms: float
    turnaround_ms: float | None
    against_sd: Interval
    against_ar: Interval


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("profiles", nargs="+", type=Path, metavar="PROFILE", help="latency profile")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="prompts per mode (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=300, metavar="N", help="tokens per text (default: 300)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the rows as JSON here")


def run(options: argparse.Namespace) -> int:
    if options.out is not None:
        ensure_writable(options.out.parent, "choose another --out")
    prompts, tokens = (values.check_int(name, getattr(options, name), 1, 1 << 20) for name in ("prompts", "max_tokens"))
    rows = {str(path): simulate(path, prompts, tokens) for path in options.profiles}
    if options.out is not None:
        record = {path: [asdict(row) for row in found] for path, found in rows.items()}
        options.out.write_text(json.dumps(record, indent=1))
    return 0


def simulate(path: Path, prompts: int, max_tokens: int) -> list[SimulatedRow]:
    """Runs one profile and prints its table.

    Raises:
        WorkerError: the real work took longer than the simulated time.
    """
    profile = Profile.read(path)
    contestants = _contestants(profile)
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        texts = random_prompts(prompts + 1)
        longest = SamplingParams(max_tokens=max(max_tokens, WARM_UP_TOKENS), ignore_eos=True)
        script = write_model_and_script(Path(folder), texts, longest)
        runs: dict[str, list[Run]] = {}
        turnarounds: dict[str, list[float]] = {}
        for cluster in dict.fromkeys(contestant.cluster for contestant in contestants):
            chosen = [contestant for contestant in contestants if contestant.cluster == cluster]
            with simulated_machine(path, script) as check, _start_cluster(folder, *cluster) as client:
                for contestant in chosen:
                    print(f"{profile.name}: {contestant.name}", file=sys.stderr, flush=True)
                    found = _run_contestant(client, contestant, texts, max_tokens)
                    runs[contestant.name], turnarounds[contestant.name] = found
                    check()
    hop_ms = (median_turnaround(list(chain(*turnarounds.values()))) or 0.0) / 2
    rows = [_make_row(profile, one, runs, hop_ms, median_turnaround(turnarounds[one.name])) for one in contestants]
    _print_table(profile, rows)
    return rows


# --- contestants ------------------------------------------------------------------------------------------------------


def _contestants(profile: Profile) -> list[Contestant]:
    """Returns AR, SD at the published and its best K, SSD by the paper's policy, and then ours step by step."""
    best_depth, published = find_best_sd(profile).depth, profile.published
    sd_depth = published.sd_depth if published else best_depth
    depth, branches = (published.ssd_depth, published.branches) if published else (best_depth, 10)
    ours = find_best_ssd(profile, Policy("ssd"))
    baselines = [Contestant("ar", Policy("ar"), "ar"), Contestant(f"sd K={sd_depth}", Policy("sd", sd_depth), "sd")]
    if best_depth != sd_depth:
        baselines.append(Contestant(f"sd K={best_depth}", Policy("sd", best_depth), "sd"))
    at = f"K={depth} B={branches}"
    return [
        *baselines,
        Contestant(f"ssd {at} geometric, full", Policy("ssd", depth, branches, "geometric", anytime=False), "ssd"),
        Contestant(f"ssd {at} best-first, full", Policy("ssd", depth, branches, anytime=False), "ssd"),
        Contestant(f"ssd {at} best-first, anytime", Policy("ssd", depth, branches), "ssd"),
        Contestant(f"ssd K={ours.depth} B={ours.branches} best-first, anytime", ours, "ssd"),
        Contestant(f"auto K<={ours.depth} B={ours.branches}", ours, "auto"),
    ]


def _predict(profile: Profile, policy: Policy, hop_ms: float = 0.0) -> float:
    return Simulator(profile, policy, hop_ms=hop_ms).run(PREDICTED_TOKENS).tokens_per_second


# --- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def _start_cluster(model: str, fan_out: str, anytime: bool) -> Iterator[Client]:
    with LocalCluster(
        memory=False,
        model=model,
        draft_model=model,
        fan_out=fan_out,
        branch_depth="auto" if anytime else "full",
        ngrams=False,
    ) as cluster:
        yield cluster.client()


def _run_contestant(
    client: Client, contestant: Contestant, starts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[Run], list[float]]:
    """Returns the runs of all prompts but the first, which warms up the estimates, and their turnarounds."""
    policy = contestant.policy
    runner = TurnaroundRunner(client, contestant.mode, policy.depth, policy.branches)

    def sampling(tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, ignore_eos=True)

    if contestant.mode == "ar":  # every token takes the same time
        return [runner(starts[1], sampling(min(max_tokens, 100)))] * (len(starts) - 1), []
    runner(starts[0], sampling(WARM_UP_TOKENS))
    runner.turnarounds_ms.clear()
    return [runner(start, sampling(max_tokens)) for start in starts[1:]], runner.turnarounds_ms


# --- results ----------------------------------------------------------------------------------------------------------


def _make_row(
    profile: Profile, contestant: Contestant, runs: dict[str, list[Run]], hop_ms: float, turnaround_ms: float | None
) -> SimulatedRow:
    own_runs, is_predictable = runs[contestant.name], contestant.mode != "auto"
    sd = next(others for name, others in runs.items() if name.startswith("sd"))
    found = summarize([run.timings for run in own_runs if run.timings])
    timed = [run.timed for run in own_runs]
    return SimulatedRow(
        contestant.name,
        total_rate(timed),
        _predict(profile, contestant.policy, hop_ms=hop_ms) if is_predictable else None,
        _predict(profile, contestant.policy) if is_predictable else None,
        _published_rate(profile.published, contestant),
        found.hit_rate or 0.0,
        found.tokens / found.rounds,
        found.sums.idle_ms / found.rounds,
        turnaround_ms,
        ratio(timed, [run.timed for run in sd]),
        ratio(timed, [run.timed for run in runs["ar"]]),
    )


def _published_rate(published: Published | None, contestant: Contestant) -> float | None:
    if published is None or contestant.mode == "auto":
        return None
    depth, policy = {"ar": 0, "sd": published.sd_depth, "ssd": published.ssd_depth}[contestant.mode], contestant.policy
    if contestant.mode == "ar":
        return published.ar
    if policy.depth != depth or (contestant.mode == "ssd" and policy.fan_out != "geometric"):
        return None
    return published.sd if contestant.mode == "sd" else published.ssd


def _print_table(profile: Profile, rows: Sequence[SimulatedRow]) -> None:
    print(f"\n{profile.name}")
    print(
        f"  target {_format_curve(profile.target.points)} ms by rows,"
        f" draft {_format_curve(profile.draft.points)} ms by rows,"
    )
    print(f"  link {profile.link_ms} ms one way, acceptance {_format_shares(profile.acceptance)},")
    print(f"  bonus ranks {_format_shares(profile.bonus_ranks[:4])}, ...")
    if p := profile.published:
        print(f"  published: AR {p.ar}, SD {p.sd}, SSD {p.ssd}: SSD/SD {p.ssd / p.sd:.2f}")
    print(f"\n| | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|")
    for row in rows:
        cells = [
            row.name,
            f"{row.measured:.1f}",
            *("" if value is None else f"{value:.1f}" for value in (row.predicted, row.ideal, row.published)),
            str(row.against_sd),
            f"{row.against_ar.value:.2f}",
            f"{row.hit_rate:.2f}" if row.hit_rate else "",
            f"{row.tokens_per_round:.2f}",
            f"{row.idle_ms:.2f}",
            "" if row.turnaround_ms is None else f"{row.turnaround_ms:.2f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def _format_shares(shares: Iterable[float]) -> str:
    return ", ".join(f"{share:g}" for share in shares)


def _format_curve(points: Iterable[tuple[int, float]]) -> str:
    return ", ".join(f"{rows}: {ms:g}" for rows, ms in points)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
