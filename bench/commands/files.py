"""What a bench leaves: a record as JSON, a picture beside it, and what it ran on."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.bench import picture
from outrider.orchestrator.cli.screen import say
from outrider.orchestrator.machine import blas
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest


def write(
    out: Path, name: str, title: str, settings: ServeSettings, results: Mapping[str, Any], draw: Callable[[Path], None]
) -> None:
    """Writes `name`.json, with the machine beside the results, and has `name`.png drawn where that can be; says where
    they are.

    Raises:
        InvalidRequest: they can't be written.
    """
    try:
        (out / f"{name}.json").write_text(json.dumps({"machine": machine(settings), **results}, indent=1))
    except OSError as error:
        raise InvalidRequest(f"the results can't be written to {out}: {error.strerror}") from error
    written = [out / f"{name}.json"]
    if picture.can_draw():
        written.append(out / f"{name}.png")
        draw(written[-1])
    else:
        say(picture.LEFT_OUT)
    print(f"{title}\nwritten: {', '.join(map(str, written))}")


def machine(settings: ServeSettings) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "pyzmq", "numpy")},
        "blas": blas.notes(),
        "threads": settings.threads,
        "branches": settings.breadth,
    }
