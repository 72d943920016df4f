"""What may run a package on this machine, by name: Core ML's compute units, or the reference interpreter."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.runtime.coreml_runtime import UNITS, CoreMLRuntime
from outrider.drafting.coreml.runtime.interpreter import NumpyRuntime
from outrider.drafting.coreml.runtime.runtime import Runtime

REFERENCE = "REFERENCE"
NAMES = (*UNITS, REFERENCE)


def runtime_of(package: Package, units: str, functions: Sequence[str] | None = None) -> Runtime:
    """A runtime for `package` on `units`, one of NAMES, with `functions` or all of them.

    Raises:
        ModelError: there is no such device here, or it refuses the package.
    """
    return NumpyRuntime(package.mlpackage) if units == REFERENCE else CoreMLRuntime(package, units, functions)
