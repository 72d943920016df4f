"""Files with the measurements of a pair on this machine, from which `auto` starts in the next run.

Each pair has two files in the cache folder, named by models, backend and threads: the results of `outrider tune`, and
those of a server's own rounds (`PolicyStore`). Each holds one record for each temperature class (greedy, sampled). A
file is written whole or not at all; an unreadable one is ignored.

`PolicyStore` is read when a server starts, and written while no request runs and at the end. It never raises if the
file can't be read or written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.digest import cache_folder, replace_file
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

FORMAT = 2
LEAST_MS = 1e-3  # a shorter time of a forward is invalid


@dataclass(frozen=True, slots=True)
class TunedArm:
    """An arm and its tokens per second: `measured` in real rounds, or a forecast.

    A K or B of 0 is not tuned and follows the formula. The rate is that of `at_once` requests together. `drafter` is an
    in-process drafter or n-grams (empty: draft workers), `kind` the kind of text (`acceptance`).
    """

    mode: str
    depth: int
    branches: int
    tokens_per_second: float
    measured: bool = False
    at_once: int = 1
    drafter: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class InProcessKnown:
    """An in-process drafter: the time for a token of its chains, and their acceptance by position."""

    name: str
    step_ms: float
    acceptance: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Costs in milliseconds at temperature `temp`, each measured alone, and the resulting choices, best first.

    Pairs of a number and milliseconds: `verify_ms` is a forward by its rows, `plain_ms` a plain step by its texts,
    `trees_ms` one more token for all branches by their number. A prefill worker reads prompts from `prefill_from`
    tokens faster than the target (0: not measured). `own` are the in-process drafters.
    """

    step_ms: float
    verify_ms: tuple[tuple[int, float], ...]
    depth_ms: float
    draft_ms: float
    link_ms: float
    turnaround_ms: float
    acceptance: tuple[float, ...]
    hit_rate: float
    choices: tuple[TunedArm, ...]
    temp: float = 0.0
    plain_ms: tuple[tuple[int, float], ...] = ()
    trees_ms: tuple[tuple[int, float], ...] = ()
    prefill_from: int = 0
    own: tuple[InProcessKnown, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temp == 0


def path_for(settings: ServeSettings) -> Path:
    """Returns the file of tune's records for this pair; `settings` must name folders (see `pairing`)."""
    return _file("tuning", _pair(settings))


def memory_for(settings: ServeSettings) -> Path:
    """Returns the file of what servers of this pair learned; its name depends on the drafters and their processes."""
    key = [*_pair(settings), settings.ngrams, settings.colocate, str(settings.replay)]
    return _file("memory", [*key, list(settings.head)] if settings.head else key)


def _pair(settings: ServeSettings) -> list[object]:
    key: list[object] = [
        settings.model,
        settings.draft_model,
        settings.draft_backend,
        settings.threads,
        os.cpu_count(),
    ]
    key += [f"{settings.shards} ranks"] if settings.shards > 1 else []
    key += [settings.head_in] if settings.head_in != "target" else []
    return key if settings.simulate is None else [*key, str(settings.simulate.resolve())]


def _file(kind: str, key: Sequence[object]) -> Path:
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_folder() / f"{kind}-{name}.json"


def nearest(tunings: Sequence[Tuning], temp: float) -> Tuning | None:
    """Returns the record of the nearest temperature, one of the same class if possible; None without records."""
    return min(tunings, key=lambda tuning: (tuning.is_greedy != (temp == 0), abs(tuning.temp - temp)), default=None)


def save(tuning: Tuning, path: Path) -> None:
    """Replaces the record of the same class, atomically: an interrupted run changes nothing.

    Raises:
        InvalidRequest: the folder can't be written to.
    """
    try:
        write([*(record for record in load(path) if record.is_greedy != tuning.is_greedy), tuning], path)
    except OSError as error:
        raise InvalidRequest(f"the tuning can't be written to {path.parent}: {error.strerror}") from error


def write(records: Sequence[Tuning], path: Path, after: str = "") -> None:
    """Replaces the file's records atomically; `after` is the `digest` of the file that they began from. Raises
    OSError."""
    fields = {"format": FORMAT, "after": after, "tunings": [asdict(record) for record in records]}
    replace_file(path, json.dumps(fields, indent=1))


def load(path: Path, after: str | None = None) -> tuple[Tuning, ...]:
    """Returns the records in a file, at most one of each class; none of another format.

    `after`: the digest of the file that they must have begun from; None: any.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT or (after is not None and fields["after"] != after):
            return ()
        return tuple(_tuning(record) for record in fields["tunings"])
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        log.warning("ignoring %s: %s", path, error)
        return ()


def digest(path: Path) -> str:
    """Returns the hash of a file's content; empty if it can't be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _tuning(fields: dict[str, Any]) -> Tuning:
    fields["choices"] = tuple(_checked(TunedArm(**choice)) for choice in fields["choices"])
    fields["own"] = tuple(
        InProcessKnown(str(own["name"]), _number(own["step_ms"]), _shares(own["acceptance"]))
        for own in fields.get("own", ())
    )
    for name in ("verify_ms", "plain_ms", "trees_ms"):
        fields[name] = tuple((max(int(rows), 1), _number(ms, LEAST_MS)) for rows, ms in fields.get(name, ()))
    fields["acceptance"] = _shares(fields["acceptance"])
    fields["hit_rate"] = min(_number(fields["hit_rate"]), 1.0)
    fields["step_ms"] = _number(fields["step_ms"], LEAST_MS)
    fields["prefill_from"] = max(int(fields.get("prefill_from", 0)), 0)
    for name in ("depth_ms", "draft_ms", "link_ms", "turnaround_ms", "temp"):
        fields[name] = _number(fields[name])
    return Tuning(**fields)


def _checked(arm: TunedArm) -> TunedArm:
    rate, at_once = _number(arm.tokens_per_second), max(int(arm.at_once), 1)
    numbers = str(arm.mode), int(arm.depth), int(arm.branches), rate
    return TunedArm(*numbers, bool(arm.measured), at_once, str(arm.drafter), str(arm.kind))


def _shares(values: Sequence[Any]) -> tuple[float, ...]:
    return tuple(min(_number(value), 1.0) for value in values)


def _number(value: Any, least: float = 0.0) -> float:
    """Returns `value` as a finite float of at least `least`. Raises ValueError or TypeError."""
    if not least <= float(value) < math.inf:
        raise ValueError(f"{value!r} is neither a time nor a share")
    return float(value)


SECONDS = 60


class PolicyStore:
    """The file of what `auto` learned; `path` None: nothing is kept."""

    def __init__(self, path: Path | None, now_ns: int) -> None:
        self._path = path
        self._after = ""
        self._written_ns = now_ns
        self._complained = False

    def read(self, tuned: Path) -> tuple[Tuning, ...]:
        """Returns what an earlier server learned; nothing if the tuning at `tuned` is not the one that it began from.

        The file names that tuning by its digest, since clocks do not show which file is newer.
        """
        self._after = digest(tuned)
        return () if self._path is None else load(self._path, self._after)

    def is_due(self, now_ns: int) -> bool:
        """Whether the last write was more than `SECONDS` ago."""
        return self._path is not None and now_ns - self._written_ns > SECONDS * SECOND_NS

    def write(self, learned: Sequence[Tuning], now_ns: int) -> None:
        """Writes what was learned; if that is nothing, the file stays as it is."""
        self._written_ns = now_ns
        if self._path is None or not learned:
            return
        try:
            write(learned, self._path, self._after)
            self._complained = False
        except OSError as error:
            level = logging.INFO if self._complained else logging.WARNING
            self._complained = True
            message = "what auto learned can't be saved in %s: %s; the next server starts without it"
            log.log(level, message, self._path, error.strerror)
