"""Where Core ML plans to run a package's operations (macOS)."""

from __future__ import annotations

import importlib

from draft_worker.coreml import quiet
from draft_worker.coreml.coreml_runtime import compiled_path
from draft_worker.coreml.package import Package

_NO_WORK = ("const", "constexpr")


def engine_share(package: Package, units: str) -> dict[str, float]:
    """For each function, the share of its operations planned for the Neural Engine; {} where Core ML tells no plan."""
    coremltools = quiet.coremltools()
    plans = importlib.import_module("coremltools.models.compute_plan")
    devices = importlib.import_module("coremltools.models.compute_device")
    plan = plans.MLComputePlan.load_from_path(str(compiled_path(package)), coremltools.ComputeUnit[units])
    program = plan.model_structure.program
    if program is None:
        return {}
    shares = {}
    for name, function in program.functions.items():
        placed = []
        for operation in function.block.operations:
            if operation.operator_name.split(".")[-1].startswith(_NO_WORK):
                continue
            usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
            if usage is not None:
                placed.append(isinstance(usage.preferred_compute_device, devices.MLNeuralEngineComputeDevice))
        shares[name] = round(sum(placed) / len(placed), 4) if placed else 0.0
    return shares
