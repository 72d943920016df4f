"""A system OpenBLAS for the workers on Linux: MLX's CPU wheel carries the reference BLAS, whose cost is linear in rows.

Preloaded, it takes the wheel's place. On macOS MLX uses Accelerate and nothing is needed. Knows files and environments.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.worker_process import CPU_KERNELS

MISSING = (
    "no OpenBLAS was found, so verifying M tokens costs M times one token instead of 1.2 to 1.4 times;"
    " install it (Debian, Ubuntu: apt install libopenblas0-pthread; Fedora: dnf install openblas)"
)
CHOICE = "OUTRIDER_OPENBLAS"
"""Names the library to preload; empty: none, MLX runs on what its wheel carries."""
THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_NAMES = ("libopenblas.so.0", "libopenblasp.so.0", "libopenblaso.so.0", "libopenblas.so")
_LDCONFIG_SECONDS = 5


def openblas() -> Path | None:
    """The library to preload, that of `CHOICE` before any other; None where there is none, or none is needed.

    Raises:
        InvalidRequest: `CHOICE` names no file.
    """
    chosen = os.environ.get(CHOICE)
    if not needs_openblas() or chosen == "":
        return None
    if chosen is not None:
        return _given(Path(chosen))
    machine = platform.machine()
    folders = [f"/usr/lib/{machine}-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib64", "/usr/local/lib"]
    for folder in folders:
        for name in _NAMES:
            if Path(folder, name).is_file():
                return Path(folder, name)
    return _known_to_loader()


def _given(library: Path) -> Path:
    if not library.is_file():
        raise InvalidRequest(f"{CHOICE} names {library}, which is not a file; expected a libopenblas.so.0, or nothing")
    return library


def needs_openblas() -> bool:
    return sys.platform.startswith("linux")


def notes() -> tuple[str, ...]:
    """What a person should know about this machine's BLAS; mostly nothing."""
    wanted = needs_openblas() and os.environ.get(CHOICE) != ""
    return (MISSING,) if wanted and openblas() is None else ()


def environment(base: dict[str, str], threads: int, kernels: str | None = None) -> dict[str, str]:
    """`base` with OpenBLAS preloaded where it is needed and found, and `threads` threads for any BLAS there is.

    `kernels`: what makes forwards on a CPU (`protocol.worker_process`); None: what `base` says.
    """
    changed = {**base, **dict.fromkeys(THREAD_VARIABLES, str(threads))}
    if kernels is not None:
        changed[CPU_KERNELS] = kernels
    library = openblas()
    loaded = base.get("LD_PRELOAD", "")
    if library is not None and "openblas" not in loaded:
        changed["LD_PRELOAD"] = f"{loaded}:{library}".strip(":")
    return changed


def _known_to_loader() -> Path | None:
    """What the dynamic loader's cache lists, for libraries in unusual places."""
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            listing = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=_LDCONFIG_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            continue
        for line in listing.stdout.splitlines():
            name, _, path = line.strip().partition(" => ")
            if name.split(" ")[0] in _NAMES and Path(path).is_file():
                return Path(path)
    return None
