"""The link to a drafter on another host is cut and healed at random while texts grow: each must be what it is without.

    python -m tools.cuts                      # 30 cuts of half a second to 15 s, 2 ms there and back, 1 % lost
    python -m tools.cuts --cuts 6 --seconds 1,3

Every other cut is somewhere on the way, where no end's system knows of it; the others pull the cable out of the
drafter's host. Four requests are always in flight, as in `tests.harness.chaos`; who drafts for them is on the other
host alone. Needs root, for the namespaces. Prints how soon the drafter was back once the link was healed, and the
longest wait for a chunk; the exit code is 1 where a text is another one, a request fails, or the drafter does not come
back.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

from outrider.bench.commands.files import numbers
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.client.client import Client
from outrider.protocol import values
from outrider.protocol.errors import OutriderError, WorkerError
from tests.harness.chaos import AT_ONCE, MOST_CHUNKS, Course, Growth, Struck
from tests.harness.random_identity import DIFFERENT, SAME, TIE
from tests.harness.two_hosts import namespace
from tests.harness.two_hosts.drafter import NAME, far_cluster, wait_for
from tests.harness.two_hosts.hosts import TwoHosts


@dataclass(frozen=True, slots=True)
class Cut:
    """Of the link between `hosts` for so long, once so many more chunks have come; `pulled` as in `TwoHosts.cut`."""

    hosts: TwoHosts
    seconds: float
    pulled: bool
    after: int

    def __str__(self) -> str:
        return f"{'pulled' if self.pulled else 'cut'} for {self.seconds:g} s"

    def fall(self, client: Client, growth: Growth) -> Struck:
        growth.wait(self.after)
        began = time.monotonic()
        self.hosts.cut(self.pulled)
        growth.wait(1)
        pause_s = time.monotonic() - began
        time.sleep(max(self.seconds - pause_s, 0.0))
        self.hosts.heal()
        return Struck(self, pause_s, wait_for(client, NAME, "ready"))


def report(course: Course) -> str:
    """What came of it, a line for each length of cut."""
    verdicts = [one.verdict for one in course.found]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in (SAME, TIE, DIFFERENT))
    lines = [f"{len(course.strikes)} cuts, {len(verdicts)} texts: {counts}"]
    for name in sorted({str(one.strike) for one in course.strikes}):
        back = [one.resumed_s for one in course.strikes if str(one.strike) == name]
        lines.append(
            f"{name}, {len(back)} times: back {statistics.median(back):.1f} s after (median), {max(back):.1f} at most"
        )
    lines.append(f"the longest wait for a chunk: {max(course.waits_ms, default=0.0):.0f} ms")
    return "\n".join(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cuts", type=int, default=30, metavar="N", help="how many, default 30")
    parser.add_argument(
        "--seconds", default="0.5,1,3,7,15", metavar="S,S,...", help="for how long, default 0.5,1,3,7,15"
    )
    parser.add_argument("--rtt-ms", type=float, default=2.0, metavar="MS", help="there and back, default 2")
    parser.add_argument("--loss", type=float, default=0.01, metavar="SHARE", help="of packets each way, default 0.01")
    parser.add_argument("--texts", type=int, default=24, metavar="N", help="how many different requests, default 24")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other requests and moments, default 0")


def run(options: argparse.Namespace) -> int:
    if (why := namespace.why_not()) is not None:
        raise WorkerError(f"two hosts can't be made here: {why}")
    lengths = numbers("seconds", options.seconds, float)
    count = values.whole("cuts", options.cuts, 1, 100_000)
    texts = values.whole("texts", options.texts, AT_ONCE, 10_000)
    screen, rng, failed = Screen(), random.Random(options.seed), ""
    with TwoHosts(options.seed) as hosts:
        hosts.shape(options.rtt_ms, options.loss)
        with far_cluster(hosts, max_active=AT_ONCE) as client:
            screen.show("what the texts are undisturbed")
            course = Course(client, texts, options.seed)
            kinds = [(length, pulled) for length in lengths for pulled in (False, True)]
            cuts = [Cut(hosts, *kinds[n % len(kinds)], rng.randint(1, MOST_CHUNKS)) for n in range(count)]
            try:
                course.run(cuts, screen)
            except OutriderError as error:
                failed = f"{type(error).__name__}: {error}"
    screen.clear()
    told = [str(one) for one in course.found if one.verdict != SAME]
    print("\n".join([*told, report(course), *([failed] if failed else [])]))
    return int(bool(failed) or any(one.verdict == DIFFERENT for one in course.found))


if __name__ == "__main__":
    raise SystemExit(run_as_program())
