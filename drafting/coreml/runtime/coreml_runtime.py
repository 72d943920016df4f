"""Core ML itself (macOS): one compiled model a function, all loaded before the first call.

coremltools' predict holds the GIL for the whole call and lets go of inputs late, on a queue of Core ML's own. So the
worker that uses this is a process of its own, every call comes from one thread, and inputs are buffers that outlive it.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafting.coreml.package import quiet
from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.runtime.runtime import DeviceAbsent, Inputs, Outputs, RuntimeFault, State
from outrider.protocol.errors import ModelError

UNITS = ("CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY", "ALL")


class CoreMLRuntime:
    """A `Runtime` over `package` on `units`, one of UNITS.

    Raises:
        ModelError: this is no Mac with Core ML, or Core ML refuses the package.
    """

    def __init__(self, package: Package, units: str, functions: Sequence[str] | None = None) -> None:
        """
        Args:
            functions: only these (all by default); each takes its time and its memory to load.
        """
        self.name = f"Core ML on {units}"
        coremltools = quiet.coremltools()
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

    def new_state(self) -> State | None:
        if not self._stateful:
            return None
        state: State = self._guarded(lambda: next(iter(self._models.values())).make_state())
        return state

    def call(self, function: str, inputs: Inputs, state: State | None) -> Outputs:
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
    """The compiled model beside the package, made when it is not there; one for each build of macOS.

    Raises:
        DeviceAbsent: this is no Mac.
        ModelError: Core ML refuses the package, or its directory can't be written to.
    """
    if sys.platform != "darwin":
        raise DeviceAbsent("Core ML runs on macOS only; elsewhere the reference interpreter stands in for it")
    path = package.path.resolve() / f"compiled-{os_build()}.mlmodelc"
    if path.is_dir():
        return path
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            partial = Path(directory) / "model.mlmodelc"
            _compile(package, partial)
            with suppress(OSError):  # another process was quicker, and its work is as good
                partial.rename(path)
    except OSError as error:
        raise ModelError(f"{package.path} can't be written to ({error}); compiled models are kept there") from error
    return path


def _compile(package: Package, destination: Path) -> None:
    try:
        quiet.coremltools().models.utils.compile_model(str(package.mlpackage), str(destination))
    except Exception as error:  # coremltools raises it bare
        raise ModelError(f"Core ML can't compile {package.path}: {first_line(error)}") from error


def os_build() -> str:
    """macOS's build number (or the kernel's release elsewhere): a plan made on one does not hold on the next."""
    if sys.platform != "darwin":
        return platform.release()
    command = ["/usr/bin/sw_vers", "-buildVersion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return done.stdout.strip() or platform.mac_ver()[0]


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
