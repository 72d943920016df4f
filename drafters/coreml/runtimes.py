"""Runs packages by Core ML (macOS), and asks it about this machine.

For tests without Core ML, the variable `STAND_IN_VARIABLE` names a module whose `open_runtime` replaces Core ML's.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.package import Package, import_coremltools
from outrider.protocol.errors import ModelError, OutriderError, WorkerError, first_line

Inputs = Mapping[str, NDArray[np.float32]]
Outputs = dict[str, NDArray[np.float32]]

COMPUTE_UNITS = ("CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY", "ALL")
STAND_IN_VARIABLE = "OUTRIDER_COREML_STAND_IN"
MACOS_ONLY_MESSAGE = "Core ML runs packages on macOS 15 or newer only"
NO_COREMLTOOLS_MESSAGE = "Core ML needs coremltools, which is not installed and needs Python 3.13 or older"
_CONSTANT_OPERATORS = ("const", "constexpr")


class DeviceUnavailable(ModelError):
    """This machine can't run the package."""


class RuntimeFault(WorkerError):
    """The device that runs a package failed."""


def require_core_ml() -> None:
    """Raises DeviceUnavailable if packages can't run on this system."""
    macos = int(platform.mac_ver()[0].partition(".")[0] or 0)  # 0: another system
    if macos < 15 and STAND_IN_VARIABLE not in os.environ:  # older ones know no functions of a model
        raise DeviceUnavailable(MACOS_ONLY_MESSAGE)
    if find_spec("coremltools") is None:
        raise DeviceUnavailable(NO_COREMLTOOLS_MESSAGE)


def open_runtime(package: Package, units: str, functions: Sequence[str] | None = None) -> CoreMLRuntime:
    """Returns a runtime for `package` on `units`, one of `COMPUTE_UNITS`.

    Args:
        functions: only these (default: all); each takes time and memory to load.

    Raises:
        DeviceUnavailable: there is no Core ML, it refuses the package, or its directory can't be written to.
    """
    require_core_ml()
    if (stand_in := os.environ.get(STAND_IN_VARIABLE)) is not None:
        runtime: CoreMLRuntime = importlib.import_module(stand_in).open_runtime(package)
        return runtime
    return CoreMLRuntime(package, units, functions)


class CoreMLRuntime:
    """Runs the functions of one package; see `open_runtime`. All compiled models are loaded before the first call.

    coremltools' `predict` holds the GIL for the whole call, and releases its inputs later, on Core ML's own queue. So
    its worker is a process of its own, makes all calls on one thread, and keeps the input buffers alive after a call.

    `name`: Core ML and its device, for users.
    """

    def __init__(self, package: Package, units: str, functions: Sequence[str] | None = None) -> None:
        self.name = f"Core ML on {units}"
        compiled, tools = ensure_compiled(package), import_coremltools()
        with _convert_errors(f"Core ML can't load {package.path} on {units}"):
            self._models = {
                name: tools.models.CompiledMLModel(
                    str(compiled),
                    compute_units=tools.ComputeUnit[units],
                    function_name=name,
                    optimization_hints={"specializationStrategy": tools.SpecializationStrategy.FastPrediction},
                )
                for name in functions or [function.name for function in package.layout.functions]
            }

    def call(self, function: str, inputs: Inputs) -> Outputs:
        """Runs `function`, which was loaded. Inputs are float32, of the shapes in the package's layout.

        The input arrays remain the caller's: it may write to them after the call, and must never free them between
        calls. Raises RuntimeFault if the device fails.
        """
        with _convert_errors(f"{self.name} failed", RuntimeFault, "; drafting is off for this request"):
            outputs = self._models[function].predict(dict(inputs))
        return {name: np.asarray(array, np.float32) for name, array in outputs.items()}


@contextmanager
def _convert_errors(what: str, kind: type[OutriderError] = DeviceUnavailable, then: str = "") -> Iterator[None]:
    """Converts errors of coremltools, which raises plain Exception, to `kind` with one sentence."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {first_line(error)}{then}") from error


def ensure_compiled(package: Package) -> Path:
    """Returns the compiled model next to the package, and compiles it if this build of macOS has none.

    Raises:
        DeviceUnavailable: Core ML refuses the package, or its directory can't be written to.
    """
    path = package.path.resolve() / f"compiled-{os_build()}.mlmodelc"
    if path.is_dir():
        return path
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            partial = Path(directory) / "model.mlmodelc"
            with _convert_errors(f"Core ML can't compile {package.path}"):
                import_coremltools().models.utils.compile_model(str(package.mlpackage), str(partial))
            with suppress(OSError):  # another process was faster, with the same result
                partial.rename(path)
    except OSError as error:
        raise DeviceUnavailable(
            f"{package.path} can't be written to ({error}); compiled models are kept there"
        ) from error
    return path


def os_build() -> str:
    """Returns macOS's build number (elsewhere the kernel's release): a plan of one build is not valid for another."""
    if sys.platform != "darwin":
        return platform.release()
    done = subprocess.run(["/usr/bin/sw_vers", "-buildVersion"], capture_output=True, text=True, timeout=10)
    return done.stdout.strip() or platform.mac_ver()[0]


def has_neural_engine() -> bool:
    """Whether there is a Neural Engine; True if Core ML does not report its devices."""
    devices = import_coremltools(".models.compute_device")
    with suppress(DeviceUnavailable), _convert_errors("Core ML does not answer"):
        present = devices.MLComputeDevice.get_all_compute_devices()
        return any(isinstance(device, devices.MLNeuralEngineComputeDevice) for device in present)
    return True


def engine_share(package: Package, units: str) -> float | None:
    """Returns the share of the first function's operations that are planned for the Neural Engine.

    The plan is only informative; without one, the result is None.
    """
    devices, plans = import_coremltools(".models.compute_device"), import_coremltools(".models.compute_plan")
    placed = []
    with suppress(DeviceUnavailable), _convert_errors("Core ML does not answer"):
        compiled, unit = str(ensure_compiled(package)), import_coremltools().ComputeUnit[units]
        plan = plans.MLComputePlan.load_from_path(compiled, unit)
        for operation in plan.model_structure.program.functions[package.layout.functions[0].name].block.operations:
            usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
            constant = operation.operator_name.split(".")[-1].startswith(_CONSTANT_OPERATORS)
            if usage is not None and not constant:
                placed.append(isinstance(usage.preferred_compute_device, devices.MLNeuralEngineComputeDevice))
    return round(sum(placed) / len(placed), 4) if placed else None
