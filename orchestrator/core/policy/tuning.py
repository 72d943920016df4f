"""Files with the measurements of a pair on this machine, from which `auto` starts in the next run.

Each pair has two files in the cache folder, named by what decides its costs, such as models and threads: the results of
`outrider tune`, and those of a server's own rounds (`PolicyStore`). Each holds one record for each temperature class
(greedy, sampled). A file is written whole or not at all; an unreadable one is ignored.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.digest import cache_folder, file_hash, replace_file
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.schema import MAX_BRANCHES, Depth
from outrider.protocol.worker_link import WORKER_MODULES_VARIABLE

log = logging.getLogger(__name__)

FORMAT_VERSION = 2
MAX_MEASUREMENT = 1e9  # milliseconds: 12 days; sums and products of larger numbers could overflow

Time = Annotated[float, Meta(ge=0.0, le=MAX_MEASUREMENT)]
"""Milliseconds, or another number that is not negative."""
ForwardTime = Annotated[float, Meta(ge=1e-3, le=MAX_MEASUREMENT)]
TimesByCount = tuple[tuple[Annotated[int, Meta(ge=1)], ForwardTime], ...]
WRITE_INTERVAL_SECONDS = 60


@dataclass(frozen=True, slots=True)
class TunedArm:
    """An arm and its tokens per second: `measured` in real rounds, or a forecast.

    A K or B of 0 is not tuned and follows the formula. The rate is that of `at_once` requests together. `drafter` is an
    in-process drafter or n-grams (empty: draft workers), `kind` the kind of text (`acceptance`).
    """

    mode: str
    depth: Depth
    branches: Annotated[int, Meta(ge=0, le=MAX_BRANCHES // 2)]  # those of slower drafters rank after them
    tokens_per_second: Time
    measured: bool = False
    at_once: Annotated[int, Meta(ge=1)] = 1
    drafter: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class TunedDrafter:
    """An in-process drafter: the time for a token of its chains, and their acceptance by position."""

    name: str
    step_ms: Time
    acceptance: tuple[Time, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Costs in milliseconds at temperature `temp`, each measured alone, and the resulting choices, best first.

    Pairs of a number and milliseconds: `verify_ms` is a forward by its rows beside draft workers, `all_cores_ms` one
    while they rest, `plain_ms` a plain step by its texts, `trees_ms` one more token for all branches by their number. A
    prefill worker reads prompts from `prefill_from` tokens faster than the target (0: not measured). `own` are the
    in-process drafters.
    """

    step_ms: ForwardTime
    verify_ms: TimesByCount
    depth_ms: Time
    draft_ms: Time
    link_ms: Time
    turnaround_ms: Time
    acceptance: tuple[Time, ...]
    hit_rate: Time
    choices: tuple[TunedArm, ...]
    temp: Time = 0.0
    plain_ms: TimesByCount = ()
    all_cores_ms: TimesByCount = ()
    trees_ms: TimesByCount = ()
    prefill_from: Annotated[int, Meta(ge=0)] = 0
    own: tuple[TunedDrafter, ...] = ()

    @property
    def is_greedy(self) -> bool:
        return self.temp == 0


@dataclass(frozen=True, slots=True)
class TuningFile:
    """The content of a file."""

    format: int
    tunings: tuple[Tuning, ...] = ()


def tuning_path(settings: ServeSettings) -> Path:
    """Returns the file of tune's records for this pair; `settings` must name folders (see `pairing`)."""
    return _record_path("tuning", _pair_key(settings))


def memory_path(settings: ServeSettings) -> Path:
    """Returns the file of what servers of this pair learned; its name depends on the drafters, their processes, and the
    content of tune's file: what was learned before a new tuning is not used after it."""
    key = [*_pair_key(settings), settings.ngrams, settings.colocate, list(settings.head)]
    with suppress(OSError):  # there is none
        key.append(file_hash(tuning_path(settings)))
    return _record_path("memory", key)


def _pair_key(settings: ServeSettings) -> list[object]:
    key: list[object] = [
        settings.model,
        settings.draft_model,
        settings.draft_backend,
        settings.threads,
        os.cpu_count(),
    ]
    key += [f"{settings.shards} ranks"] if settings.shards > 1 else []
    key += [settings.head_in] if settings.head_in != "target" else []
    key += [choice for choice in (settings.cpu_kernels, settings.draft_device) if choice != "auto"]
    modules = os.environ.get(WORKER_MODULES_VARIABLE)
    return key if modules is None else [*key, modules]


def _record_path(kind: str, key: Sequence[object]) -> Path:
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return cache_folder() / f"{kind}-{name}.json"


def nearest_record(tunings: Sequence[Tuning], temp: float) -> Tuning | None:
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


def write(records: Sequence[Tuning], path: Path) -> None:
    """Replaces the file's records atomically. Raises OSError."""
    replace_file(path, json.dumps(asdict(TuningFile(FORMAT_VERSION, tuple(records))), indent=1))


def load(path: Path) -> tuple[Tuning, ...]:
    """Returns the records in a file, at most one of each class; none of another format."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=TuningFile)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        log.warning("ignoring %s: %s", path, error)
        return ()
    return file.tunings if file.format == FORMAT_VERSION else ()


class PolicyStore:
    """The file of what `auto` learned, which is read when a server starts, and written while no request runs and at the
    end; `path` None: nothing is kept. Never raises if the file can't be read or written."""

    def __init__(self, path: Path | None, now_ns: int) -> None:
        self._path = path
        self._written_ns = now_ns
        self._written: Sequence[Tuning] = ()
        self._has_warned = False

    def read(self) -> tuple[Tuning, ...]:
        """Returns what an earlier server learned."""
        return () if self._path is None else load(self._path)

    def is_due(self, now_ns: int) -> bool:
        """Whether the last write was more than `WRITE_INTERVAL_SECONDS` ago."""
        return self._path is not None and now_ns - self._written_ns > WRITE_INTERVAL_SECONDS * SECOND_NS

    def write(self, learned: Sequence[Tuning], now_ns: int) -> None:
        """Writes what was learned; if that is nothing, or nothing since the last write, the file stays as it is."""
        self._written_ns = now_ns
        if self._path is None or not learned or learned == self._written:
            return
        try:
            write(learned, self._path)
            self._written, self._has_warned = learned, False
        except OSError as error:
            level = logging.INFO if self._has_warned else logging.WARNING
            self._has_warned = True
            message = "what auto learned can't be saved in %s: %s; the next server starts without it"
            log.log(level, message, self._path, error.strerror)
