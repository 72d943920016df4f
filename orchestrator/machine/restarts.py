"""When a worker that died is started again, and when no more.

The wait doubles with each death in a row; a worker that has done something since its start, or stood for a while,
begins a new row. After so many in a row whoever depends on it has to know, so it is given up. Knows counts and times;
knows no process.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_NS = 250_000_000
MOST_DEATHS = 5
STEADY_NS = 60_000_000_000


@dataclass(slots=True)
class Restarts:
    """One worker's: `done` so far, `deaths` in a row, and when the next start is due, if one is."""

    done: int = 0
    deaths: int = 0
    due_ns: int | None = None

    def died(self, now_ns: int, worked: bool, stood_ns: int) -> bool:
        """Counts a death; False: it is given up.

        Args:
            worked: it had done something for a request.
            stood_ns: for so long it had been ready.
        """
        self.deaths = 1 if worked or stood_ns >= STEADY_NS else self.deaths + 1
        comes_back = self.deaths < MOST_DEATHS
        self.due_ns = now_ns + (FIRST_NS << (self.deaths - 1)) if comes_back else None
        return comes_back

    def is_due(self, now_ns: int) -> bool:
        return self.due_ns is not None and now_ns >= self.due_ns

    def begun(self) -> None:
        """It was started again."""
        self.done, self.due_ns = self.done + 1, None
