"""Whether a worker answers and moves, counted in pings and not in seconds.

Who does not run sends no pings: a server that was stopped, or slept with the whole machine, finds nobody silent.
"""

from __future__ import annotations

from dataclasses import dataclass

# Pings go out this often in the time for which a worker may be silent. A quiet drafter is done without much earlier.
SILENT = 30
QUIET = 8
# A busy thread may stand still for longer: it answers, and one forward may take its time.
STILL = 60


@dataclass(slots=True)
class Pulse:
    """One worker's answers. `unanswered` pings since it was last heard; `still`: answers in a row without progress."""

    unanswered: int = 0
    still: int = 0
    progress: int = -1

    def answered(self, progress: int, newest: bool) -> None:
        """`newest`: it answers the latest ping; older ones, answered late and at once, say nothing of its speed."""
        self.unanswered = 0
        if progress != self.progress:
            self.progress, self.still = progress, 0
        elif newest:
            self.still += 1

    @property
    def faint(self) -> bool:
        """It may come back; nobody should wait for it."""
        return self.unanswered >= QUIET or self.still >= STILL // 2

    def gone(self, seconds_a_ping: float) -> str | None:
        """Why it is given up, or None."""
        if self.unanswered >= SILENT:
            return f"has not answered for {self.unanswered * seconds_a_ping:.0f} s"
        if self.still >= STILL:
            return f"has not moved for {self.still * seconds_a_ping:.0f} s"
        return None
