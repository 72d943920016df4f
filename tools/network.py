"""Compares SSD with a drafter behind a network with the same cluster without a network, on a simulated machine.

    python -m tools.network                # round trips of 0.2, 2 and 20 ms, without loss and with 1 %
    python -m tools.network --links 2:0.01 --prompts 16

Both clusters run together and receive requests in turn; both drafters were started by hand, by `outrider worker`. One
connects by a unix socket, the other by TCP with keys from a second network namespace, over a link with the given
latency and loss. Target and drafter sleep for the profile's times and have its acceptance; everything else is real.
Needs root, for the namespaces. Prints the tokens per second of both, their ratio, and the traffic on the link.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from outrider.bench.comparison.runs import PromptRunner, Run, mode_runner, ratio, run_interleaved, summarize, total_rate
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.settings import Settings
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.sampling import SamplingParams
from tests.harness.two_hosts import namespace
from tests.harness.two_hosts.drafter import NAME, remote_cluster, run_drafter
from tests.harness.two_hosts.hosts import Traffic, TwoHosts
from tools.simulation.environment import simulated_machine
from tools.simulation.profile import PROFILES, TIMES_NOT_KEPT
from tools.simulation.script import random_prompts, write_model_and_script

PROFILE = PROFILES / "verify-40ms.json"
LINKS = "0.2:0,0.2:0.01,2:0,2:0.01,20:0,20:0.01"
MAX_REPEATS = 100
NEAR, FAR = "near", NAME
COLUMNS = (
    "tok/s near", "tok/s far", "far / near [95 %]", "hit rate near", "far", "tokens per round near", "far",
    "verify ms near", "far", "idle ms near", "far", "bytes per round to the drafter", "from it", "packets per round",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LinkShape:
    """A link's round-trip time in milliseconds, and the share of packets that it loses each way."""

    rtt_ms: float
    loss: float

    def __str__(self) -> str:
        return f"{self.rtt_ms:g} ms, {self.loss:.0%} loss"


@dataclass(slots=True)
class RepeatingRunner:
    """Repeats each run of `runner` in which this machine could not keep the profile's times; counts the `repeats`.

    `check` raises WorkerError after such a run.
    """

    runner: PromptRunner
    check: Callable[[], None]
    repeats: int = 0

    def __call__(self, prompt: Sequence[int], sampling: SamplingParams) -> Run:
        while True:
            run = self.runner(prompt, sampling)
            try:
                self.check()
                return run
            except WorkerError as error:
                if TIMES_NOT_KEPT not in str(error) or self.repeats == MAX_REPEATS:
                    raise
                self.repeats += 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    links = f"round-trip times and losses (default: {LINKS})"
    parser.add_argument("--links", default=LINKS, metavar="MS:LOSS,...", help=links)
    profile = "latency profile (default: verify-40ms.json)"
    parser.add_argument("--profile", type=Path, default=PROFILE, metavar="FILE", help=profile)
    parser.add_argument("--depth", type=int, default=5, metavar="K", help="draft tokens (default: 5)")
    parser.add_argument("--branches", type=int, default=16, metavar="B", help="branches (default: 16)")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="prompts per link (default: 8)")
    parser.add_argument("--max-tokens", type=int, default=300, metavar="N", help="tokens per text (default: 300)")


def run(options: argparse.Namespace) -> int:
    if (why := namespace.unsupported_reason()) is not None:
        raise WorkerError(f"two hosts can't be made here: {why}")
    shapes = [_parse_shape(text) for text in options.links.split(",")]
    count, length = (values.check_int(name, getattr(options, name), 1, 1 << 16) for name in ("prompts", "max_tokens"))
    prompts = random_prompts(count + 1)
    with tempfile.TemporaryDirectory(prefix="outrider-") as text:
        folder, screen = Path(text), Screen()
        screen.show("generating the target's texts")
        sampling = SamplingParams(max_tokens=length, temp=1.0, ignore_eos=True)
        script = write_model_and_script(folder, prompts, sampling)
        with TwoHosts() as hosts, ExitStack() as stack:
            check = stack.enter_context(simulated_machine(options.profile, script))
            machine = Settings(model=folder, mode="ssd", memory=False)
            models = ["--model", str(folder), "--draft-model", str(folder)]
            near = stack.enter_context(_near_cluster(hosts, models, **machine))
            far = stack.enter_context(remote_cluster(hosts, models, **machine))
            runners = {
                name: RepeatingRunner(mode_runner(client, "ssd", options.depth, options.branches), check)
                for name, client in ((NEAR, near), (FAR, far))
            }
            print(f"{options.profile.stem}, K = {options.depth}, B = {options.branches}, {count} prompts x {length}")
            print(f"| link | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|")
            for shape in shapes:
                hosts.shape(shape.rtt_ms, shape.loss)
                before = hosts.traffic()
                runs = run_interleaved(runners, prompts, sampling, screen.show)
                screen.clear()
                _print_row(shape, runs, hosts.traffic() - before)
            print(f"runs repeated because this machine was busy: {sum(runner.repeats for runner in runners.values())}")
    return 0


def _parse_shape(text: str) -> LinkShape:
    try:
        rtt_ms, loss = map(float, text.split(":"))
    except ValueError:
        raise InvalidRequest(f"{text!r} is not a link; expected milliseconds and loss, like 2:0.01") from None
    return LinkShape(values.check_float("milliseconds", rtt_ms, 0, 10_000), values.check_float("loss", loss, 0, 1))


@contextmanager
def _near_cluster(hosts: TwoHosts, options: Sequence[str], **settings: Unpack[Settings]) -> Iterator[Client]:
    """Runs the cluster of `remote_cluster` with its drafter on this host."""
    settings["draft_backend"] = "ngram"
    with hosts.here.entered():
        cluster = LocalCluster(**settings)
    with cluster:
        client = cluster.client()
        with run_drafter(client, hosts.here, f"{cluster.endpoint.rpartition('/')[0]}/workers", NEAR, *options):
            yield client


def _print_row(shape: LinkShape, runs: dict[str, list[Run]], traffic: Traffic) -> None:
    """Prints a line of the table, without the first prompt, which warms up the estimates."""
    near, far = runs[NEAR][1:], runs[FAR][1:]
    summaries = [summarize([run.timings for run in found if run.timings]) for found in (near, far)]
    rounds = sum(run.timings.rounds for run in runs[FAR] if run.timings)
    if [run.tokens for run in near] != [run.tokens for run in far]:
        raise WorkerError("texts differ between the near and the far drafter; expected equal texts for the same seed")
    cells = [
        *(f"{total_rate([run.timed for run in found]):.1f}" for found in (near, far)),
        str(ratio([run.timed for run in far], [run.timed for run in near])),
        *(f"{s.hit_rate or 0:.3f}" for s in summaries),
        *(f"{s.tokens / s.rounds:.2f}" for s in summaries),
        *(f"{s.sums.verify_ms / s.rounds:.2f}" for s in summaries),
        *(f"{s.sums.idle_ms / s.rounds:.2f}" for s in summaries),
        *(f"{value / rounds:.0f}" for value in (traffic.bytes_there, traffic.bytes_back)),
        f"{traffic.packets / rounds:.1f}",
    ]
    print(f"| {shape} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
