"""The interface of runtimes, which run a package, and Core ML itself (macOS).

`Runtime` has two implementations, this module's `CoreMLRuntime` and `interpreter.NumpyRuntime`, so that the host is the
same on a Mac and elsewhere. `CoreMLRuntime` has one compiled model for each function, all loaded before the first call.
coremltools' predict holds the GIL for the whole call, and releases inputs late, on Core ML's own queue. So its worker
is a process of its own, every call comes from one thread, and input buffers outlive it.

`has_engine` and `engine_share` report whether there is a Neural Engine, and which operations Core ML plans for it.
"""

from __future__ import annotations

import importlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml import saved
from outrider.drafters.coreml.package import Package
from outrider.protocol.errors import ModelError, WorkerError, first_line

Inputs = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[np.float32]]


class RuntimeState(Protocol):
    """One request's cache inside a runtime; opaque to the host."""


class Runtime(Protocol):
    """Runs the functions of one package. Every call comes from the same thread.

    `name`: the runtime and its device, for users.
    """

    name: str

    def new_state(self) -> RuntimeState | None:
        """Returns an empty cache; None for a package whose cache is owned by the host."""
        ...

    def call(self, function: str, inputs: Inputs, state: RuntimeState | None) -> Outputs:
        """Runs `function`. Inputs are float32 (int32 for positions) of the shapes in the package's layout.

        The input arrays remain the caller's: it may write to them after the call, and must never free them between
        calls. Raises RuntimeFault if the device fails.
        """
        ...

    def close(self) -> None: ...


class DeviceAbsent(ModelError):
    """This machine lacks the device, for any package."""


class RuntimeFault(WorkerError):
    """The device that runs a package failed."""


UNITS = ("CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY", "ALL")


class CoreMLRuntime:
    """A `Runtime` over `package` on `units`, one of UNITS.

    Raises:
        ModelError: this is not a Mac with Core ML, or Core ML refuses the package.
    """

    def __init__(self, package: Package, units: str, functions: Sequence[str] | None = None) -> None:
        """
        Args:
            functions: only these (default: all); each takes time and memory to load.
        """
        self.name = f"Core ML on {units}"
        coremltools = saved.coremltools()
        self._stateful = package.layout.mode.stateful
        compiled = compiled_path(package)
        try:
            self._models = {
                name: coremltools.models.CompiledMLModel(
                    str(compiled),
                    compute_units=coremltools.ComputeUnit[units],
                    function_name=name,
                    optimization_hints={"specializationStrategy": coremltools.SpecializationStrategy.FastPrediction},
                )
                for name in functions or [function.name for function in package.layout.functions]
            }
        except Exception as error:  # coremltools raises it bare
            raise ModelError(f"Core ML can't load {package.path} on {units}: {first_line(error)}") from error

    def new_state(self) -> RuntimeState | None:
        if not self._stateful:
            return None
        state: RuntimeState = self._guarded(lambda: next(iter(self._models.values())).make_state())
        return state

    def call(self, function: str, inputs: Inputs, state: RuntimeState | None) -> Outputs:
        model = self._models.get(function)
        if model is None:
            raise RuntimeFault(f"the function {function} was not loaded; loaded are {', '.join(self._models)}")
        outputs = self._guarded(lambda: model.predict(dict(inputs), state))
        return {name: np.asarray(array, np.float32) for name, array in outputs.items()}

    def close(self) -> None:
        self._models = {}

    def _guarded(self, task: Callable[[], Any]) -> Any:
        try:
            return task()
        except Exception as error:  # coremltools raises it bare
            raise RuntimeFault(f"{self.name} failed: {first_line(error)}; drafting is off for this request") from error


def compiled_path(package: Package) -> Path:
    """Returns the compiled model next to the package, compiled if it is missing; one for each build of macOS.

    Raises:
        DeviceAbsent: this is not a Mac.
        ModelError: Core ML refuses the package, or its directory can't be written to.
    """
    if sys.platform != "darwin":
        raise DeviceAbsent("Core ML runs on macOS only; elsewhere the reference interpreter replaces it")
    path = package.path.resolve() / f"compiled-{os_build()}.mlmodelc"
    if path.is_dir():
        return path
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            partial = Path(directory) / "model.mlmodelc"
            _compile(package, partial)
            with suppress(OSError):  # another process was faster, with the same result
                partial.rename(path)
    except OSError as error:
        raise ModelError(f"{package.path} can't be written to ({error}); compiled models are kept there") from error
    return path


def _compile(package: Package, destination: Path) -> None:
    try:
        saved.coremltools().models.utils.compile_model(str(package.mlpackage), str(destination))
    except Exception as error:  # coremltools raises it bare
        raise ModelError(f"Core ML can't compile {package.path}: {first_line(error)}") from error


def os_build() -> str:
    """Returns macOS's build number (elsewhere the kernel's release): a plan of one build is not valid for another."""
    if sys.platform != "darwin":
        return platform.release()
    command = ["/usr/bin/sw_vers", "-buildVersion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return done.stdout.strip() or platform.mac_ver()[0]


_NO_WORK = ("const", "constexpr")
Answer = TypeVar("Answer")


def has_engine() -> bool:
    """Whether there is a Neural Engine. Raises ModelError if Core ML does not report its devices."""
    devices = importlib.import_module("coremltools.models.compute_device")
    present = _query(lambda: list(devices.MLComputeDevice.get_all_compute_devices()))
    return any(isinstance(device, devices.MLNeuralEngineComputeDevice) for device in present)


def engine_share(package: Package, units: str) -> dict[str, float]:
    """Returns, for each function with a plan, the share of its operations planned for the Neural Engine.

    Raises:
        ModelError: Core ML makes no plan for the package.
    """
    return _query(lambda: _shares(str(compiled_path(package)), units))


def _shares(compiled: str, units: str) -> dict[str, float]:
    coremltools = saved.coremltools()
    plans = importlib.import_module("coremltools.models.compute_plan")
    devices = importlib.import_module("coremltools.models.compute_device")
    plan = plans.MLComputePlan.load_from_path(compiled, coremltools.ComputeUnit[units])
    program = plan.model_structure.program
    shares = {}
    for name, function in program.functions.items() if program is not None else ():
        placed = []
        for operation in function.block.operations:
            if operation.operator_name.split(".")[-1].startswith(_NO_WORK):
                continue
            usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
            if usage is not None:
                placed.append(isinstance(usage.preferred_compute_device, devices.MLNeuralEngineComputeDevice))
        if placed:  # a plan reports nothing for functions that it does not cover
            shares[name] = round(sum(placed) / len(placed), 4)
    return shares


def _query(query: Callable[[], Answer]) -> Answer:
    saved.coremltools()
    try:
        return query()
    except Exception as error:  # coremltools raises it bare
        raise ModelError(f"Core ML does not answer: {first_line(error)}") from error
