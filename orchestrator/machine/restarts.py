"""When a worker that died is started again, and when no more.

The wait doubles with each death in a row, up to a minute; a worker that has done something since its start, or stood
for a while, begins a new row. Given up is, after so many in a row, one that all requests depend on, so that whoever
runs the server has to know, and one whose load fails again and again with the same error. Knows counts and times;
knows no process.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_NS, LONGEST_NS = 250_000_000, 60_000_000_000
MOST_DEATHS = 5
STEADY_NS = 60_000_000_000


@dataclass(slots=True)
class Restarts:
    """One worker's: `done` so far, `deaths` in a row, and when the next start is due, if one is.

    `failed_loads`: the latest deaths in a row of which each was a load that ended with `error`.
    """

    done: int = 0
    deaths: int = 0
    due_ns: int | None = None
    failed_loads: int = 0
    error: str = ""

    def died(self, now_ns: int, worked: bool, stood_ns: int, needed: bool, error: str = "") -> bool:
        """Counts a death; False: it is given up.

        Args:
            worked: it had done something for a request.
            stood_ns: for so long it had been ready.
            needed: no request can do without it.
            error: what its load said at its own end, if that was its end.
        """
        self.deaths = 1 if worked or stood_ns >= STEADY_NS else self.deaths + 1
        self.failed_loads = self.failed_loads + 1 if error and error == self.error else int(bool(error))
        self.error = error
        comes_back = (self.deaths if needed else self.failed_loads) < MOST_DEATHS
        self.due_ns = now_ns + self.wait_ns if comes_back else None
        return comes_back

    @property
    def wait_ns(self) -> int:
        """How long after the latest death it is started again."""
        return min(FIRST_NS << min(self.deaths - 1, 32), LONGEST_NS)

    def is_due(self, now_ns: int) -> bool:
        return self.due_ns is not None and now_ns >= self.due_ns

    def begun(self) -> None:
        """It was started again."""
        self.done, self.due_ns = self.done + 1, None
