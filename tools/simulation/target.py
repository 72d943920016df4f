"""`python -m tools.simulation.target --profile FILE ...`: the target worker of a simulated machine.

The other arguments are those of `outrider.target_worker`.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Hello
from outrider.protocol.worker_link import WorkerLink
from outrider.target_worker import __main__ as target
from tools.simulation.environment import report_too_slow, take_options
from tools.simulation.pace import Pace
from tools.simulation.profile import Profile

if TYPE_CHECKING:
    from outrider.target_worker.ranks import RankLeader
    from outrider.target_worker.worker import TargetWorker


def load_worker(
    path: Path, options: argparse.Namespace, leader: RankLeader | None, link: WorkerLink
) -> tuple[Hello, TargetWorker]:
    """Returns a target whose forwards take the times of the profile at `path`.

    Raises:
        InvalidRequest: the profile can't be used, or the target would draft, or feed a head.
    """
    profile = Profile.read(path)
    if options.drafter or options.publish_features:
        raise InvalidRequest("heads and colocate can't be simulated; expected a draft model in a process of its own")
    hello, worker = target.load_worker(options, leader, link)
    from tools.simulation.paced_runner import PacedRunner  # only now, as it imports MLX

    worker.runner = PacedRunner(Pace(profile.target, clock=time.monotonic, on_late=partial(report_too_slow, link)))
    return replace(hello, note="; ".join(filter(None, [f"simulating {profile.name}", hello.note]))), worker


if __name__ == "__main__":
    raise SystemExit(target.main(partial(load_worker, take_options().profile)))
