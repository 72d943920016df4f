"""Where Core ML plans to run a package's operations, and whether there is a Neural Engine to run them (macOS)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

from outrider.drafting.coreml.package import quiet
from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.runtime.coreml_runtime import compiled_path, first_line
from outrider.protocol.errors import ModelError

_NO_WORK = ("const", "constexpr")
Told = TypeVar("Told")


def has_engine() -> bool:
    """Raises ModelError where Core ML does not tell its devices."""
    devices = importlib.import_module("coremltools.models.compute_device")
    found = _asked(lambda: list(devices.MLComputeDevice.get_all_compute_devices()))
    return any(isinstance(device, devices.MLNeuralEngineComputeDevice) for device in found)


def engine_share(package: Package, units: str) -> dict[str, float]:
    """For each function Core ML has a plan for, the share of its operations planned for the Neural Engine.

    Raises:
        ModelError: Core ML makes no plan of the package.
    """
    return _asked(lambda: _shares(str(compiled_path(package)), units))


def _shares(compiled: str, units: str) -> dict[str, float]:
    coremltools = quiet.coremltools()
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
        if placed:  # of functions that a plan is not for, nothing is told
            shares[name] = round(sum(placed) / len(placed), 4)
    return shares


def _asked(question: Callable[[], Told]) -> Told:
    quiet.coremltools()
    try:
        return question()
    except Exception as error:  # coremltools raises it bare
        raise ModelError(f"Core ML does not tell: {first_line(error)}") from error
