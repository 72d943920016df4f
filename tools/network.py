"""SSD with its drafter behind a network, beside the same cluster without one, on a simulated machine.

    python -m tools.network                # 0.2, 2 and 20 ms there and back, without loss and with 1 %
    python -m tools.network --links 2:0.01 --prompts 16

Both clusters run at once and are asked in turns; in both the drafter is a process of its own that a person started. One
reaches its cluster by a unix socket, the other over TCP, with keys, from a second network namespace, through a link
that is slow and lossy as asked. Target and drafter take the profile's times by sleeping and err as often as it says;
all else is real. Needs root, for the namespaces. Prints tokens per second of both, their ratio, and what went over the
link.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

from outrider.bench.comparison.runs import ModeRunner, Run, ratio, run_interleaved, total_rate
from outrider.bench.comparison.summary import summary
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.settings import Settings
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.profile import NOT_KEPT
from outrider.protocol.sampling import SamplingParams
from tests.harness.two_hosts import namespace
from tests.harness.two_hosts.drafter import NAME, drafter, far_cluster
from tests.harness.two_hosts.hosts import Carried, TwoHosts
from tools.simulation.script import starts, write_script
from tools.simulation.stand_in import write

PROFILE = Path(__file__).parents[1] / "bench" / "profiles" / "verify-40ms.json"
LINKS = "0.2:0,0.2:0.01,2:0,2:0.01,20:0,20:0.01"
# The script goes on behind the last token asked for, as a text would.
SPARE_TOKENS = 64
MOST_AGAIN = 100
NEAR, FAR = "near", NAME
COLUMNS = (
    "tok/s near", "tok/s far", "far over near [95 %]", "hits near", "far", "tokens a round near", "far",
    "verify ms near", "far", "idle ms near", "far", "bytes a round to it", "from it", "packets a round",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a link: milliseconds there and back, and the share of packets that is lost, each way."""

    rtt_ms: float
    loss: float

    def __str__(self) -> str:
        return f"{self.rtt_ms:g} ms, {self.loss:.0%} lost"


@dataclass(slots=True)
class Undisturbed:
    """`way`, asked `again` where this machine could not keep to the profile's times."""

    way: ModeRunner
    again: int = 0

    @property
    def name(self) -> str:
        return self.way.name

    def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Run:
        while True:
            try:
                return self.way.run(prompt, sampling)
            except WorkerError as error:
                if NOT_KEPT not in str(error) or self.again == MOST_AGAIN:
                    raise
                self.again += 1


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--links", default=LINKS, metavar="MS:LOSS,...", help=f"there and back, default {LINKS}")
    parser.add_argument("--profile", type=Path, default=PROFILE, metavar="FILE", help="default: verifies of 40 ms")
    parser.add_argument("--depth", type=int, default=5, metavar="K")
    parser.add_argument("--branches", type=int, default=16, metavar="B")
    parser.add_argument("--prompts", type=int, default=8, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=300, metavar="N")


def run(options: argparse.Namespace) -> int:
    if (why := namespace.why_not()) is not None:
        raise WorkerError(f"two hosts can't be made here: {why}")
    shapes = [_shape(text) for text in options.links.split(",")]
    count, length = (values.whole(name, getattr(options, name), 1, 1 << 16) for name in ("prompts", "max_tokens"))
    begun = starts(count + 1)
    with tempfile.TemporaryDirectory(prefix="outrider-") as text:
        folder, screen = Path(text), Screen()
        write(folder)
        screen.show("what the target says")
        # by the seeds that `compete` gives
        drawn = SamplingParams(max_tokens=length + SPARE_TOKENS, temp=1.0, ignore_eos=True)
        write_script(folder / "script.json", folder, begun, [replace(drawn, seed=n) for n in range(len(begun))])
        with TwoHosts() as hosts, ExitStack() as stack:
            machine = Settings(model=folder, simulate=options.profile, mode="ssd", memory=False)
            script = ["--draft-backend", "replay", "--replay", str(folder / "script.json"), "--model", str(folder)]
            script += ["--simulate", str(options.profile)]
            near = stack.enter_context(_near_cluster(hosts, script, **machine))
            far = stack.enter_context(far_cluster(hosts, script, **machine))
            ways = [
                Undisturbed(ModeRunner(name, one, "ssd", options.depth, options.branches))
                for name, one in ((NEAR, near), (FAR, far))
            ]
            print(f"{options.profile.stem}, K = {options.depth}, B = {options.branches}, {count} prompts x {length}")
            print(f"| link | {' | '.join(COLUMNS)} |\n{'|---' * (len(COLUMNS) + 1)}|")
            for shape in shapes:
                hosts.shape(shape.rtt_ms, shape.loss)
                before = hosts.carried()
                runs = run_interleaved(
                    ways, begun, SamplingParams(max_tokens=length, temp=1.0, ignore_eos=True), screen.show
                )
                screen.clear()
                _print(shape, runs, hosts.carried() - before)
            print(f"asked again, for the machine was busy: {sum(way.again for way in ways)}")
    return 0


def _shape(text: str) -> Shape:
    try:
        rtt_ms, loss = map(float, text.split(":"))
    except ValueError:
        raise InvalidRequest(
            f"{text!r} is no link; expected milliseconds and a share that is lost, like 2:0.01"
        ) from None
    return Shape(values.number("milliseconds", rtt_ms, 0, 10_000), values.number("loss", loss, 0, 1))


@contextmanager
def _near_cluster(hosts: TwoHosts, options: Sequence[str], **settings: Unpack[Settings]) -> Iterator[Client]:
    """The same as `far_cluster` with its drafter here."""
    settings["draft_backend"] = "ngram"
    with hosts.here.entered():
        cluster = LocalCluster(**settings)
    with cluster:
        client = cluster.client()
        with drafter(client, hosts.here, f"{cluster.endpoint.rpartition('/')[0]}/workers", NEAR, *options):
            yield client


def _print(shape: Shape, runs: dict[str, list[Run]], carried: Carried) -> None:
    """Of every prompt but the first, which warms up what learns."""
    near, far = runs[NEAR][1:], runs[FAR][1:]
    sums = [summary([run.timings for run in found if run.timings]) for found in (near, far)]
    rounds = sum(run.timings.rounds for run in runs[FAR] if run.timings)
    if [run.tokens for run in near] != [run.tokens for run in far]:
        raise WorkerError("the texts are not the same; expected them to be, whatever the link does")
    cells = [
        *(f"{total_rate([run.timed for run in found]):.1f}" for found in (near, far)),
        str(ratio([run.timed for run in far], [run.timed for run in near])),
        *(f"{one.hit_rate or 0:.3f}" for one in sums),
        *(f"{one.tokens / one.rounds:.2f}" for one in sums),
        *(f"{one.verify_ms / one.rounds:.2f}" for one in sums),
        *(f"{one.idle_ms / one.rounds:.2f}" for one in sums),
        *(f"{value / rounds:.0f}" for value in (carried.bytes_there, carried.bytes_back)),
        f"{carried.packets / rounds:.1f}",
    ]
    print(f"| {shape} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    raise SystemExit(run_as_program())
