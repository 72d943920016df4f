"""Which CPU core a process runs on. Only two cores need telling apart: there target and drafter have one each.

The orchestrator is on the drafter's, and goes first there: on the target's core it would make the target's forwards
wait, on which everything waits, and the drafter works ahead anyway (docs/log.md). Linux only.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from outrider.orchestrator.settings import ServeSettings

BEHIND = 5
"""How nice a drafter is to the orchestrator: a third of its weight where both want to run."""
GIVEN = sorted(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else []
"""The cores this process was given."""


def place(pid: int, role: str, settings: ServeSettings) -> None:
    """Keeps the process of a `role` to its core; on the orchestrator's it comes after that."""
    core = core_of(role, settings)
    pin(pid, core)
    if role == "draft" and core is not None:
        put_behind(pid)


def core_of(role: str, settings: ServeSettings) -> int | None:
    """The core for a `target`, `draft` or `orchestrator` process; None, and for all others: any."""
    if len(GIVEN) != 2 or settings.threads != 1 or not settings.has_draft_worker:
        return None
    if settings.shards > 1 or not settings.pin_cores:  # ranks that wait for each other on one core would take turns
        return None
    return {"target": GIVEN[0], "draft": GIVEN[-1], "orchestrator": GIVEN[-1]}.get(role)


def pin(pid: int, core: int | None) -> None:
    """Keeps process `pid` (0: this one), and what it starts from now on, on `core`; None: on any it was given."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError):  # gone already, or not allowed here: it runs where it runs
        os.sched_setaffinity(pid, GIVEN if core is None else {core})


def put_behind(pid: int) -> None:
    """Has process `pid`, which leads a session and has one thread, run after others that want its core."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, BEHIND)
        Path(f"/proc/{pid}/autogroup").write_text(str(BEHIND))  # where a session's processes have a share of their own
