"""Which CPU core a process runs on. Only two cores need telling apart: there target and drafter have one each.

Orchestrator and text are left to the system, which finds the core that is idle: kept on the target's they cost plain
decoding a tenth and SSD at T = 0.8 as much (docs/log.md). Linux only.
"""

from __future__ import annotations

import os
import sys

from outrider.orchestrator.settings import ServeSettings

GIVEN = sorted(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else []
"""The cores this process was given."""


def core_of(role: str, settings: ServeSettings) -> int | None:
    """The core for a `target` or `draft` process; None, and for all others: any."""
    if len(GIVEN) != 2 or settings.threads != 1 or not settings.has_draft_worker or role not in ("target", "draft"):
        return None
    if settings.shards > 1 or not settings.pin_cores:  # ranks that wait for each other on one core would take turns
        return None
    return GIVEN[-1] if role == "draft" else GIVEN[0]


def pin(pid: int, core: int | None) -> None:
    """Keeps process `pid` (0: this one), and what it starts from now on, on `core`; None leaves it free."""
    if core is None or not sys.platform.startswith("linux"):
        return
    try:
        os.sched_setaffinity(pid, {core})
    except OSError:  # gone already, or not allowed here: it runs where it runs
        return
