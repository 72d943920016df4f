"""A latency profile: measurements of a machine we don't have, in a JSON file (docs/simulation.md lists its fields).

Workers imitate it (`--simulate`); the orchestrator checks it before anything starts. Knows numbers; paces nothing.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.protocol.errors import InvalidRequest

# The beginning of every worker's note that its own times were longer than the profile's.
NOT_KEPT = "the times are not the profile's"


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of a forward by its rows (tokens): measured points in order, linear between and beyond them.

    Beyond the first and the last point it never falls below the lesser of the two points that its line goes through.
    """

    points: tuple[tuple[int, float], ...]

    def milliseconds(self, rows: int) -> float:
        if len(self.points) == 1:
            return self.points[0][1]
        right = min(max(bisect_left(self.points, (rows, 0.0)), 1), len(self.points) - 1)
        (low, low_ms), (high, high_ms) = self.points[right - 1], self.points[right]
        return max(low_ms + (high_ms - low_ms) * (rows - low) / (high - low), min(low_ms, high_ms))


@dataclass(frozen=True, slots=True)
class Published:
    """Published measurements on the machine: tokens per second, the K of SD and of SSD, and the number of branches."""

    ar: float
    sd: float
    ssd: float
    sd_depth: int
    ssd_depth: int
    branches: int


@dataclass(frozen=True, slots=True)
class Profile:
    """A machine we don't have. `link_ms` is the one-way time of a message to or from its drafter.

    For the replay drafter: `acceptance` by chain position (the last one also holds for all later positions), and
    `bonus_ranks`, the probability that the bonus token is the drafter's candidate 0, 1, ... after its own token was
    rejected. `sources` say where the numbers are from, `notes` how they were derived.
    """

    name: str
    sources: tuple[str, ...]
    target: Latency
    draft: Latency
    link_ms: float
    acceptance: tuple[float, ...]
    bonus_ranks: tuple[float, ...]
    notes: tuple[str, ...] = ()
    published: Published | None = None

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Reads and checks a JSON profile.

        Raises:
            InvalidRequest: the file is missing or is no JSON, or a field is missing or out of range.
        """
        try:
            return _profile(json.loads(path.read_text(encoding="utf-8")))
        except KeyError as error:
            raise InvalidRequest(
                f"profile {path} has no {error.args[0]}; see docs/simulation.md for its fields"
            ) from error
        except OSError as error:
            raise InvalidRequest(f"profile {path} can't be read: {error.strerror}") from error
        except ValueError as error:
            raise InvalidRequest(f"profile {path} can't be used: {error}") from error


def _profile(fields: Any) -> Profile:
    if not isinstance(fields, dict):
        raise ValueError(f"it holds {type(fields).__name__}, expected a JSON object; see docs/simulation.md")
    published = fields.get("published")
    ranks = _shares("bonus_ranks", fields["bonus_ranks"])
    if sum(ranks) > 1 + 1e-9:
        raise ValueError(f"bonus_ranks add up to {sum(ranks):g}; expected at most 1")
    acceptance = _shares("acceptance", fields["acceptance"])
    if not acceptance:
        raise ValueError("acceptance is empty; expected at least one probability")
    return Profile(
        name=_text("name", fields["name"]),
        sources=_texts("sources", fields["sources"]),
        target=_latency("target_ms", fields["target_ms"]),
        draft=_latency("draft_ms", fields["draft_ms"]),
        link_ms=_time("link_ms", fields["link_ms"]),
        acceptance=acceptance,
        bonus_ranks=ranks,
        notes=_texts("notes", fields.get("notes", [])),
        published=None if published is None else _published(published),
    )


def _published(fields: Any) -> Published:
    if not isinstance(fields, dict):
        raise ValueError(f"published is {fields!r}; expected an object with ar, sd, ssd, sd_depth, ssd_depth, branches")
    rates = [_time(f"published {name}", fields[name]) for name in ("ar", "sd", "ssd")]
    counts = [_count(f"published {name}", fields[name]) for name in ("sd_depth", "ssd_depth", "branches")]
    return Published(rates[0], rates[1], rates[2], counts[0], counts[1], counts[2])


def _latency(name: str, points: object) -> Latency:
    if not isinstance(points, dict) or not points:
        raise ValueError(f"{name} is {points!r}; expected milliseconds by rows, like {{'1': 18.3, '8': 19.0}}")
    by_rows = {_rows(name, rows): _time(f"{name} of {rows} rows", ms) for rows, ms in points.items()}
    if len(by_rows) < len(points):
        raise ValueError(f"{name} has the same number of rows twice; expected each number once")
    return Latency(tuple(sorted(by_rows.items())))


def _rows(name: str, rows: str) -> int:
    if not rows.isascii() or not rows.isdigit() or int(rows) < 1:
        raise ValueError(f"{name} has {rows!r} for rows; expected a whole number from 1 up")
    return int(rows)


def _time(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; expected a number from 0 up")
    return float(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; expected a whole number from 1 up")
    return value


def _shares(name: str, values: object) -> tuple[float, ...]:
    if not isinstance(values, list) or not all(_is_share(value) for value in values):
        raise ValueError(f"{name} is {values!r}; expected a list of probabilities from 0 to 1")
    return tuple(float(value) for value in values)


def _is_share(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= 1


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is {value!r}; expected text")
    return value


def _texts(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise ValueError(f"{name} is {values!r}; expected a list of texts")
    return tuple(_text(name, value) for value in values)
