"""What this machine is: chip, memory, system, the libraries that compute, and what they may wire."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx

from outrider.drafting.coreml.runtime.coreml_runtime import os_build

_LIBRARIES = ("mlx", "mlx-lm", "coremltools", "numpy")
_SIDE = 384
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Blas:
    """Which library multiplies matrices on the CPU, and how fast: float32, one call at a time."""

    library: str
    gflops: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """`wired_budget_bytes`: what Metal recommends for all processes together, 0 where there is no Metal."""

    chip: str
    architecture: str
    cores: int
    memory_bytes: int
    system: str
    build: str
    python: str
    libraries: dict[str, str]
    mlx_device: str
    wired_budget_bytes: int
    blas: Blas


def inspect() -> Machine:
    """This machine, in about a second."""
    metal = mx.metal.is_available()
    return Machine(
        chip=_chip(),
        architecture=platform.machine(),
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else f"{platform.system()}",
        build=os_build(),
        python=platform.python_version(),
        libraries={name: _version(name) for name in _LIBRARIES},
        mlx_device="gpu" if metal else mx.default_device().type.name,
        wired_budget_bytes=int(mx.device_info()["max_recommended_working_set_size"]) if metal else 0,
        blas=_blas(),
    )


def blas_of(mapped: str, system: str) -> tuple[str, str]:
    """Name and note of the BLAS that MLX calls, told from the libraries `mapped` into a process."""
    if system == "darwin":
        return "Accelerate", ""
    preloaded = re.search(r"/\S*libopenblas[^/\s]*\.so\S*", mapped)
    if preloaded and ".libs/" not in preloaded.group():  # numpy carries one of its own, under other names
        return "OpenBLAS", f"preloaded from {preloaded.group()}"
    return "reference", "MLX uses the reference BLAS; preload OpenBLAS, otherwise verifying M tokens costs M times one"


def _blas() -> Blas:
    maps = Path("/proc/self/maps")
    library, note = blas_of(maps.read_text(encoding="utf-8") if maps.is_file() else "", sys.platform)
    with mx.stream(mx.cpu):
        a = mx.random.normal((_SIDE, _SIDE))
        mx.eval(a @ a)
        best = float("inf")
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            mx.eval(a @ a)
            best = min(best, time.perf_counter() - started)
    return Blas(library, round(2e-9 * _SIDE**3 / best, 1), note)


def _chip() -> str:
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout.strip()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    named = re.search(r"model name\s*:\s*(.+)", text)
    return named.group(1).strip() if named else platform.processor() or "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
