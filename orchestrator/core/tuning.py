"""What `outrider tune` found out about a pair on this machine, kept between runs so that `auto` starts from it.

A record is found again by models, backend and threads. Written whole or not at all; an unreadable one counts as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Choice:
    """A mode with the settings that suit it, and the tokens per second it promises."""

    mode: str
    depth: int
    branches: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Costs in milliseconds, each measured alone, and the choices that follow, best first."""

    step_ms: float
    verify_ms: tuple[tuple[int, float], ...]
    depth_ms: float
    draft_ms: float
    link_ms: float
    turnaround_ms: float
    acceptance: tuple[float, ...]
    hit_rate: float
    choices: tuple[Choice, ...]


def path_for(settings: ServeSettings) -> Path:
    """Where the record of this pair lies; `settings` must name folders (see `pairing`)."""
    what = [settings.model, settings.draft_model, settings.draft_backend, settings.threads, os.cpu_count()]
    if settings.simulate is not None:
        what += [str(settings.simulate.resolve())]
    key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "outrider" / f"tuning-{key}.json"


def save(tuning: Tuning, path: Path) -> None:
    """Writes the record in one step: an interrupted run leaves none, or the one before.

    Raises:
        InvalidRequest: the folder can't be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tuning-") as part:
            written = Path(part, path.name)
            written.write_text(json.dumps({"format": FORMAT, **asdict(tuning)}, indent=1), encoding="utf-8")
            os.replace(written, path)
    except OSError as error:
        raise InvalidRequest(f"the tuning can't be written to {path.parent}: {error.strerror}") from error


def load(path: Path) -> Tuning | None:
    """The record at `path`, or None."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("format") != FORMAT:
            return None
        fields["choices"] = tuple(Choice(**choice) for choice in fields["choices"])
        fields["verify_ms"] = tuple((int(rows), float(ms)) for rows, ms in fields["verify_ms"])
        fields["acceptance"] = tuple(float(share) for share in fields["acceptance"])
        return Tuning(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the tuning in %s can't be used (%s); run `outrider tune` again", path, error)
        return None
