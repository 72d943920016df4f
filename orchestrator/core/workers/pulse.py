"""Whether a worker answers and moves, counted in pings and not in seconds.

Who does not run sends no pings: a server that was stopped, or slept with the whole machine, finds nobody silent. A
worker that answers may take its time over one operation, ten times what it says that this should take; one that loads
does not answer yet, and may take ten times what its predecessor took.
"""

from __future__ import annotations

from dataclasses import dataclass

# Pings go out this often in the time for which a worker may be silent. A quiet drafter is done without much earlier.
SILENT = 40
QUIET = 8
# A worker that answers may stand still for so many times the time that its work should take, and never for less than it
# may be silent; where nobody knows how long that should take, for so many times that.
SLACK = 10
UNKNOWN = 6


@dataclass(slots=True)
class Pulse:
    """One worker's answers. `unanswered` pings since it was last heard; `still`: answers in a row without progress;
    `expected_s`: how long what it does should take, 0: not known."""

    unanswered: int = 0
    still: int = 0
    progress: int = -1
    expected_s: float = 0.0

    def answered(self, progress: int, newest: bool, expected_s: float = 0.0) -> None:
        """`newest`: it answers the latest ping; older ones, answered late and at once, say nothing of its speed."""
        self.unanswered, self.expected_s = 0, expected_s
        if progress != self.progress:
            self.progress, self.still = progress, 0
        elif newest:
            self.still += 1

    def most(self, seconds_a_ping: float) -> float:
        """Pings for which it may stand still at its work."""
        return max(SLACK * self.expected_s / seconds_a_ping, SILENT) if self.expected_s else UNKNOWN * SILENT

    def faint(self, seconds_a_ping: float) -> bool:
        """It may come back; nobody should wait for it."""
        return self.unanswered >= QUIET or self.still >= self.most(seconds_a_ping) / 2

    def gone(self, seconds_a_ping: float) -> str | None:
        """Why it is given up, or None."""
        if self.unanswered >= SILENT:
            return f"has not answered for {self.unanswered * seconds_a_ping:.0f} s"
        if self.still >= self.most(seconds_a_ping):
            return f"has made no progress for {self.still * seconds_a_ping:.0f} s"
        return None

    def stuck(self, seconds_a_ping: float) -> str | None:
        """Why a worker that loads is given up: no news of it for too long, by what it should take, if that is known."""
        if self.expected_s and self.unanswered >= self.most(seconds_a_ping):
            return f"has made no progress in starting for {self.unanswered * seconds_a_ping:.0f} s"
        return None
