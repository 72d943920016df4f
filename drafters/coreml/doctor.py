"""`python -m outrider.drafters.coreml.doctor`: this machine, and the cost of each placement of a drafter, as JSON.

`outrider doctor` formats it; the program is separate so that the command line never imports MLX. CPU and GPU are
measured now, which takes seconds; Core ML's times are those of a kept trial, or of a new one with --probe.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from outrider.drafters.coreml import trial
from outrider.drafters.coreml.runtimes import os_build, require_core_ml
from outrider.drafters.coreml.selection import PREFERRED_UNITS, cached_package, package_folder
from outrider.drafters.coreml.trial import Trial
from outrider.engine.kv_cache import Feed
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import load as load_model
from outrider.protocol.errors import ModelError, OutriderError
from outrider.protocol.process import physical_memory
from outrider.protocol.version import installed_release

log = logging.getLogger(__name__)

_TIMED_CALLS = 12
_WARM_UP_CALLS = 2
_TREE_ROWS = 8
_SHARED_GPU_NOTE = "shares the GPU with the target: each slows the other down"
_OWN_CORES_NOTE = "on cores of its own, next to the target's GPU: --draft-device cpu"
_COREML_NOTE = "next to the target's GPU: --draft-backend coreml"
_SHARED_CPU_NOTE = "shares the CPU with the target"
_LIBRARIES = ("mlx", "mlx-lm", "coremltools", "numpy")


@dataclass(frozen=True, slots=True)
class Placement:
    """The time of one token and of a tree of eight on one device of this machine: `one_ms` and `eight_ms` are
    milliseconds a call, None if unknown. `engine_share` only for Core ML."""

    name: str
    usable: bool
    one_ms: float | None = None
    eight_ms: float | None = None
    engine_share: float | None = None
    note: str = ""


def measure_device(model: Path, device: mx.DeviceType) -> Placement:
    """Measures the draft `model` on `device`, with the kernels that would serve it there."""
    default = mx.default_device()
    mx.set_default_device(mx.Device(device))
    try:
        loaded = load_model(model)
        kv_cache = open_kv_cache(loaded)
        slot = kv_cache.open()

        def step(rows: int) -> None:
            mx.eval(kv_cache.forward([Feed(slot, [0] * rows, rows)]))

        steps = (partial(step, rows) for rows in (1, _TREE_ROWS))
        one, eight = (round(trial.median_ms(timed, _TIMED_CALLS, _WARM_UP_CALLS), 3) for timed in steps)
    finally:
        mx.set_default_device(default)
    if device == mx.gpu:
        return Placement("MLX on the GPU", True, one, eight, note=_SHARED_GPU_NOTE)
    note = _OWN_CORES_NOTE if default.type == mx.gpu else _SHARED_CPU_NOTE
    return Placement("MLX on the CPU" if loaded.cpu is None else "ONNX Runtime on the CPU", True, one, eight, note=note)


def measure_core_ml(checkpoint: Path, try_now: bool) -> list[Placement]:
    """Returns the results of the draft's package on each compute unit, kept or, with `try_now`, of new trials.

    Raises:
        ModelError: there is no Core ML, or the draft can't be converted.
    """
    require_core_ml()
    if not (try_now or package_folder(checkpoint).exists()):
        return [Placement("Core ML", False, note="the draft is not converted yet: run `outrider doctor --probe`")]
    package, places = cached_package(checkpoint, log.info), []
    for units in PREFERRED_UNITS:
        found = trial.try_once(package, units, log.info) if try_now else trial.kept_trial(package, units)
        if found is None:
            found = Trial("not measured yet: run `outrider doctor --probe`")
        name, note = f"Core ML on {units}, {package.layout.weights}", found.reason or _COREML_NOTE
        one, eight = found.ms.get("q1"), found.ms.get(f"q{_TREE_ROWS}")
        places.append(Placement(name, not found.reason, one, eight, found.engine_share, note))
    return places


def inspect_machine() -> dict[str, Any]:
    """Describes this machine. `wired_budget_bytes`: the memory that Metal recommends for all processes together, 0
    without Metal."""
    metal = mx.metal.is_available()
    return {
        "chip": str(mx.device_info(mx.Device(mx.cpu))["device_name"]),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": physical_memory(),
        "system": f"macOS {platform.mac_ver()[0]}" if sys.platform == "darwin" else platform.system(),
        "build": os_build(),
        "python": platform.python_version(),
        "libraries": {name: installed_release(name) for name in _LIBRARIES},
        "mlx_device": "gpu" if metal else mx.default_device().type.name,
        "wired_budget_bytes": int(mx.device_info(mx.gpu)["max_recommended_working_set_size"]) if metal else 0,
    }


def list_placements(checkpoint: Path, try_now: bool) -> list[Placement]:
    """Returns the devices that the draft in the directory `checkpoint` could run on.

    Args:
        try_now: convert the draft if necessary, and try every Core ML unit; takes minutes on a first run.
    """
    places = [measure_device(checkpoint, mx.cpu)]
    if mx.metal.is_available():
        places.insert(0, measure_device(checkpoint, mx.gpu))
    try:
        places += measure_core_ml(checkpoint, try_now)
    except ModelError as error:
        places.append(Placement("Core ML", False, note=str(error)))
    return places


def main() -> int:
    parser = argparse.ArgumentParser(prog="outrider.drafters.coreml.doctor", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the draft: a model directory")
    parser.add_argument("--probe", action="store_true", help="convert it and try Core ML, which can take minutes")
    options = parser.parse_args()
    try:
        machine, placements = inspect_machine(), list_placements(options.model, options.probe)
    except OutriderError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    report = {"machine": machine, "model": str(options.model), "placements": placements}
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
