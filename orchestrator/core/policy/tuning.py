"""What is known of a pair on this machine, kept between runs so that `auto` starts from it.

Two files for each pair, found by models, backend and threads: what `outrider tune` measured, and what a server's own
rounds taught it (`PolicyStore`). Each holds one record for each temperature class (greedy, sampled). A file is written
whole or not at all; an unreadable one counts as none.

`PolicyStore`: what `auto` learned, read when a server starts, and written while no request runs and at the end. A file
that can't be read or written is never an error.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.clock import SECOND_NS
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

FORMAT = 2
LEAST_MS = 1e-3  # a forward that takes less was not measured


@dataclass(frozen=True, slots=True)
class TunedArm:
    """A mode with the settings that suit it, and its tokens per second: `measured` in real rounds, or a forecast.

    K and B of 0: not tuned, they follow the formula. `at_once`: so many requests brought that rate together.
    `drafter`: of the target's process, or n-grams; empty: draft workers. `kind`: the kind of text (`text_profiles`).
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
    """Of a drafter in the target's process: what a token of its chains takes, and how often those hold, by place."""

    name: str
    step_ms: float
    acceptance: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """At temperature `temp`: costs in milliseconds, each measured alone, and the choices that follow, best first.

    `prefill_from`: prompts of so many tokens and more a prefill worker reads quicker; 0: that was not measured.
    By rows or number: `verify_ms` a forward by its rows, `plain_ms` a token of so many texts, `trees_ms` a depth of so
    many branches.
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
    """Where tune's record of this pair lies; `settings` must name folders (see `pairing`)."""
    return _file("tuning", _pair(settings))


def memory_for(settings: ServeSettings) -> Path:
    """The file of what servers of this pair learned; the drafters and their places are part of its name."""
    heads = list(settings.head)
    what = [*_pair(settings), settings.ngrams, settings.colocate, str(settings.replay), *([heads] if heads else [])]
    return _file("memory", what)


def folder() -> Path:
    """Where all these files lie."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # without a home there is no file either
        home = Path(os.devnull)
    return home / "outrider"


def _pair(settings: ServeSettings) -> list[object]:
    what: list[object] = [
        settings.model,
        settings.draft_model,
        settings.draft_backend,
        settings.threads,
        os.cpu_count(),
    ]
    what += [f"{settings.shards} ranks"] if settings.shards > 1 else []
    what += [settings.head_in] if settings.head_in != "target" else []
    return what if settings.simulate is None else [*what, str(settings.simulate.resolve())]


def _file(kind: str, what: Sequence[object]) -> Path:
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    return folder() / f"{kind}-{key}.json"


def nearest(tunings: Sequence[Tuning], temp: float) -> Tuning | None:
    """The record for this temperature: of its own class if there is one, of those the nearest; None without any."""
    return min(tunings, key=lambda found: (found.is_greedy != (temp == 0), abs(found.temp - temp)), default=None)


def save(tuning: Tuning, path: Path) -> None:
    """Puts the record in the place of the one of its class, in one step: an interrupted run changes nothing.

    Raises:
        InvalidRequest: the folder can't be written to.
    """
    try:
        write([*(found for found in load(path) if found.is_greedy != tuning.is_greedy), tuning], path)
    except OSError as error:
        raise InvalidRequest(f"the tuning can't be written to {path.parent}: {error.strerror}") from error


def write(records: Sequence[Tuning], path: Path, after: str = "") -> None:
    """Makes these the file's records, in one step; `after`: the `digest` of the file that they go on from. Raises
    OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tuning-") as part:
        written = Path(part, path.name)
        told = {"format": FORMAT, "after": after, "tunings": [asdict(found) for found in records]}
        written.write_text(json.dumps(told, indent=1))
        os.replace(written, path)


def load(path: Path) -> tuple[Tuning, ...]:
    """The records in the file at `path`, at most one a class; none of another format."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            return ()
        return tuple(_tuning(record) for record in fields["tunings"])
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        log.warning("ignoring %s: %s", path, error)
        return ()


def after(path: Path) -> str:
    """What the records in the file at `path` go on from; empty where that is not known."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["after"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def digest(path: Path) -> str:
    """Tells this file from what it was; empty without one."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _tuning(fields: dict[str, Any]) -> Tuning:
    fields["choices"] = tuple(_choice(**choice) for choice in fields["choices"])
    fields["own"] = tuple(_own(**own) for own in fields.get("own", ()))
    for name in ("verify_ms", "plain_ms", "trees_ms"):
        fields[name] = tuple((max(int(rows), 1), _number(ms, LEAST_MS)) for rows, ms in fields.get(name, ()))
    fields["acceptance"] = _shares(fields["acceptance"])
    fields["hit_rate"] = min(_number(fields["hit_rate"]), 1.0)
    fields["step_ms"] = _number(fields["step_ms"], LEAST_MS)
    fields["prefill_from"] = max(int(fields.get("prefill_from", 0)), 0)
    for name in ("depth_ms", "draft_ms", "link_ms", "turnaround_ms", "temp"):
        fields[name] = _number(fields[name])
    return Tuning(**fields)


def _choice(
    mode: str,
    depth: int,
    branches: int,
    tokens_per_second: float,
    measured: bool = False,
    at_once: int = 1,
    drafter: str = "",
    kind: str = "",
) -> TunedArm:
    rate, together = _number(tokens_per_second), max(int(at_once), 1)
    return TunedArm(str(mode), int(depth), int(branches), rate, bool(measured), together, str(drafter), str(kind))


def _own(name: str, step_ms: float, acceptance: Sequence[float]) -> InProcessKnown:
    return InProcessKnown(str(name), _number(step_ms), _shares(acceptance))


def _shares(given: Sequence[Any]) -> tuple[float, ...]:
    return tuple(min(_number(share), 1.0) for share in given)


def _number(value: Any, least: float = 0.0) -> float:
    """A finite one from `least`. Raises ValueError or TypeError."""
    if not least <= float(value) < math.inf:
        raise ValueError(f"{value!r} is neither a time nor a share")
    return float(value)


SECONDS = 60


class PolicyStore:
    """The file at `path`; None: nothing is carried over."""

    def __init__(self, path: Path | None, now_ns: int) -> None:
        self._path = path
        self._after = ""
        self._written_ns = now_ns
        self._complained = False

    def read(self, tuned: Path) -> tuple[Tuning, ...]:
        """What an earlier server learned; nothing where the pair was tuned anew since, in the file at `tuned`.

        No clock tells which is newer: a file says which it goes on from.
        """
        self._after = digest(tuned)
        if self._path is None or after(self._path) != self._after:
            return ()
        return load(self._path)

    def is_due(self, now_ns: int) -> bool:
        """Whether the last writing is a while ago."""
        return self._path is not None and now_ns - self._written_ns > SECONDS * SECOND_NS

    def write(self, learned: Sequence[Tuning], now_ns: int) -> None:
        """Keeps what was learned; nothing learned changes nothing."""
        self._written_ns = now_ns
        if self._path is None or not learned:
            return
        try:
            write(learned, self._path, self._after)
            self._complained = False
        except OSError as error:
            level = logging.INFO if self._complained else logging.WARNING
            self._complained = True
            told = "what auto learned can't be saved in %s: %s; the next server starts without it"
            log.log(level, told, self._path, error.strerror)
