"""What a bench leaves: a record as JSON, a picture beside it, and what it ran on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from outrider.bench import picture
from outrider.orchestrator.cli.screen import say
from outrider.orchestrator.machine import blas
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest

MEASURED = ("mlx", "mlx-lm", "onnxruntime", "pyzmq", "numpy", "xllamacpp")


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


def _versions() -> Iterator[tuple[str, str]]:
    for name in MEASURED:
        with suppress(PackageNotFoundError):  # an extra that is not there
            yield name, version(name)


def _processor() -> dict[str, Any]:
    """What the CPU says of itself, where it says it in a file; kernels differ by its vector instructions."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split("\n\n")[0]
    except OSError:
        return {"name": platform.processor(), "cores": os.cpu_count()}
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in told.splitlines())}
    vectors = [flag for flag in found.get("flags", "").split() if flag.startswith(("avx", "amx"))]
    return {"name": found.get("model name", platform.processor()), "cores": os.cpu_count(), "vectors": vectors}


def machine(settings: ServeSettings) -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "processor": _processor(),
        "versions": dict(_versions()),
        "blas": blas.notes(),
        "threads": settings.threads,
        "branches": settings.breadth,
    }
