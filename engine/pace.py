"""Standing in for a machine that is not here: each forward takes as long as a latency profile says.

A worker with a pace does its real work, then sleeps until the profile's time for that many rows has passed, so that a
sleeping process stands for a remote accelerator. Work slower than the profile fails the run: nothing is pretended.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import InvalidRequest, WorkerError

# A simulated forward may end this much late before it counts as failed: the system's own jitter.
SLACK_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of a forward by its rows (tokens): measured points, straight lines between and beyond."""

    points: tuple[tuple[int, float], ...]

    def milliseconds(self, rows: int) -> float:
        rows_known = [point[0] for point in self.points]
        right = min(max(bisect_left(rows_known, rows), 1), len(self.points) - 1) if len(self.points) > 1 else 0
        if len(self.points) == 1:
            return self.points[0][1]
        (low, low_ms), (high, high_ms) = self.points[right - 1], self.points[right]
        return max(low_ms + (high_ms - low_ms) * (rows - low) / (high - low), min(low_ms, high_ms))


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine we don't have. `link_ms` is the one-way time of a message to or from its drafter.

    `acceptance` by chain position and `bonus_ranks` are for the replay drafter; `sources` say where the numbers are
    from.
    """

    name: str
    sources: tuple[str, ...]
    target: Latency
    draft: Latency
    link_ms: float
    acceptance: tuple[float, ...]
    bonus_ranks: tuple[float, ...]

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Reads and checks a JSON profile.

        Raises:
            InvalidRequest: the file is missing, is no JSON, or a time is missing or negative; says which.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                name=str(fields["name"]),
                sources=tuple(str(source) for source in fields["sources"]),
                target=_latency("target_ms", fields["target_ms"]),
                draft=_latency("draft_ms", fields["draft_ms"]),
                link_ms=_time("link_ms", fields["link_ms"]),
                acceptance=tuple(_share("acceptance", share) for share in fields["acceptance"]),
                bonus_ranks=tuple(_share("bonus_ranks", share) for share in fields["bonus_ranks"]),
            )
        except KeyError as error:
            raise InvalidRequest(
                f"profile {path} has no {error.args[0]}; see docs/simulation.md for its fields"
            ) from error
        except (OSError, ValueError, TypeError) as error:
            raise InvalidRequest(f"profile {path} can't be read: {error}") from error


class Pace:
    """Holds a worker to a latency. `begin` before a forward is built, `end` after it with its rows, `wait` when its
    result has been read; `nap(seconds)` is how it waits.
    """

    def __init__(self, latency: Latency, nap: Callable[[float], None] = time.sleep) -> None:
        self._latency = latency
        self._nap = nap
        self._due = 0.0

    def begin(self) -> None:
        self._due = max(self._due, time.perf_counter())

    def end(self, rows: int) -> None:
        self._due += self._latency.milliseconds(rows) / 1000

    def wait(self) -> None:
        """Sleeps until all forwards since are due.

        Raises:
            WorkerError: the real work ended after the profile's machine would have.
        """
        left = self._due - time.perf_counter()
        if left < -SLACK_SECONDS and self._due > 0:
            raise WorkerError(
                f"the real forward ended {-left * 1000:.1f} ms after the simulated one would have;"
                " use a smaller model or a slower profile"
            )
        self._due = 0.0
        self._nap(max(left, 0.0))


def _latency(name: str, points: object) -> Latency:
    if not isinstance(points, dict) or not points:
        raise ValueError(f"{name} is {points!r}; expected milliseconds by rows, like {{'1': 18.3, '8': 19.0}}")
    return Latency(tuple(sorted((int(rows), _time(f"{name}[{rows}]", ms)) for rows, ms in points.items())))


def _time(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} is {value!r}; expected milliseconds, zero or more")
    return float(value)


def _share(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} has {value!r}; expected probabilities from 0 to 1")
    return float(value)
