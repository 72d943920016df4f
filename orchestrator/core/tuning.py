"""What `outrider tune` found out about a pair on this machine, kept between runs so that `auto` starts from it.

A pair's records, one a temperature class (greedy, sampled), lie in one file that is found again by models, backend and
threads. Written whole or not at all; an unreadable file counts as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

FORMAT = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode with the settings that suit it, and its tokens per second: `measured` in real rounds, or a forecast."""

    mode: str
    depth: int
    branches: int
    tokens_per_second: float
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Tuning:
    """At temperature `temp`: costs in milliseconds, each measured alone, and the choices that follow, best first."""

    step_ms: float
    verify_ms: tuple[tuple[int, float], ...]
    depth_ms: float
    draft_ms: float
    link_ms: float
    turnaround_ms: float
    acceptance: tuple[float, ...]
    hit_rate: float
    choices: tuple[Choice, ...]
    temp: float = 0.0

    @property
    def is_greedy(self) -> bool:
        return self.temp == 0


def path_for(settings: ServeSettings) -> Path:
    """Where the record of this pair lies; `settings` must name folders (see `pairing`)."""
    what = [settings.model, settings.draft_model, settings.draft_backend, settings.threads, os.cpu_count()]
    if settings.simulate is not None:
        what += [str(settings.simulate.resolve())]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "outrider" / f"tuning-{key}.json"


def nearest(tunings: Sequence[Tuning], temp: float) -> Tuning | None:
    """The record for this temperature: of its own class if there is one, of those the nearest; None without any."""
    return min(tunings, key=lambda found: (found.is_greedy != (temp == 0), abs(found.temp - temp)), default=None)


def save(tuning: Tuning, path: Path) -> None:
    """Puts the record in the place of the one of its class, in one step: an interrupted run changes nothing.

    Raises:
        InvalidRequest: the folder can't be written to.
    """
    kept = [*(found for found in load(path) if found.is_greedy != tuning.is_greedy), tuning]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tuning-") as part:
            written = Path(part, path.name)
            records = {"format": FORMAT, "tunings": [asdict(found) for found in kept]}
            written.write_text(json.dumps(records, indent=1), encoding="utf-8")
            os.replace(written, path)
    except OSError as error:
        raise InvalidRequest(f"the tuning can't be written to {path.parent}: {error.strerror}") from error


def load(path: Path) -> tuple[Tuning, ...]:
    """The records in the file at `path`, at most one a class; none of another format."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            return ()
        return tuple(_tuning(record) for record in fields["tunings"])
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the tuning in %s can't be used (%s); run `outrider tune` again", path, error)
        return ()


def _tuning(fields: dict[str, Any]) -> Tuning:
    fields["choices"] = tuple(Choice(**choice) for choice in fields["choices"])
    fields["verify_ms"] = tuple((int(rows), float(ms)) for rows, ms in fields["verify_ms"])
    fields["acceptance"] = tuple(float(share) for share in fields["acceptance"])
    return Tuning(**fields)
