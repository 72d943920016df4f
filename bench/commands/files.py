"""What a bench leaves: a record as JSON, a picture beside it, and what it ran on."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from outrider.orchestrator.machine import blas
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest


def write(
    out: Path, name: str, title: str, settings: ServeSettings, results: Mapping[str, Any], draw: Callable[[Path], None]
) -> None:
    """Writes `name`.json, with the machine beside the results, and has `name`.png drawn; says where they are.

    Raises:
        InvalidRequest: they can't be written.
    """
    try:
        (out / f"{name}.json").write_text(json.dumps({"machine": machine(settings), **results}, indent=1))
    except OSError as error:
        raise InvalidRequest(f"the results can't be written to {out}: {error.strerror}") from error
    draw(out / f"{name}.png")
    print(f"{title}\nwritten: {out / f'{name}.json'}, {out / f'{name}.png'}")


def machine(settings: ServeSettings) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "pyzmq", "numpy")},
        "blas": blas.notes(),
        "threads": settings.threads,
        "branches": settings.breadth,
    }
