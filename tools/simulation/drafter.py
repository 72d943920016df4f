"""`python -m tools.simulation.drafter --profile FILE [--script FILE] ...`: the draft worker of a simulated machine.

The other arguments are those of `outrider.draft_worker`. With a script its texts are replayed, and the model isn't
loaded.
"""

from __future__ import annotations

import argparse
from functools import partial

from outrider.draft_worker import __main__ as draft
from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.drafter import Drafter
from outrider.protocol.messages import Hello
from outrider.protocol.worker_link import WorkerLink
from tools.simulation.environment import report_too_slow, take_options
from tools.simulation.pace import Pace
from tools.simulation.profile import Profile
from tools.simulation.replay import PacedDrafter, ReplayDrafter, Script, SlowLink


def load_worker(own: argparse.Namespace, options: argparse.Namespace, link: WorkerLink) -> tuple[Hello, DraftWorker]:
    """Returns a drafter whose forwards and messages take the times of the profile.

    Raises:
        InvalidRequest: the profile or the script can't be used.
    """
    profile = Profile.read(own.profile)
    if own.script is not None:
        options.backend, options.model = ReplayDrafter.backend, str(own.script)
        drafter: Drafter = ReplayDrafter(Script.read(own.script)).with_errors_of(profile)
    else:
        drafter = draft.load_drafter(options, link)
    slow = SlowLink(link, profile.link_ms)
    pace = Pace(profile.draft, slow.sleep, on_late=partial(report_too_slow, link))
    paced = PacedDrafter(drafter, profile.name, pace, lambda: slow.received_at)
    return draft.worker_of(options, link.incarnation, paced, slow)


if __name__ == "__main__":
    raise SystemExit(draft.main(partial(load_worker, take_options())))
