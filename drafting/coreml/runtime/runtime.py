"""What runs a package: one interface, so that the host above it is the same on a Mac and anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError, WorkerError

Inputs = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[np.float32]]


class State(Protocol):
    """One request's cache inside a runtime; opaque to the host."""


class Runtime(Protocol):
    """Runs the functions of one package. Every call comes from one and the same thread."""

    @property
    def name(self) -> str:
        """For a person: what runs it, and where."""
        ...

    def new_state(self) -> State | None:
        """An empty cache; None for a package whose cache lies with the host."""
        ...

    def call(self, function: str, inputs: Inputs, state: State | None) -> Outputs:
        """Runs `function`. Inputs are float32 (int32 for positions) of the shapes in the package's layout.

        The arrays handed in stay the caller's: it may write to them after the call, and must never free them between
        calls. Raises RuntimeFault when the device fails.
        """
        ...

    def close(self) -> None: ...


class DeviceAbsent(ModelError):
    """What is to run a package is not in this machine at all, whatever the package."""


class RuntimeFault(WorkerError):
    """The device that runs a package failed; drafting goes on elsewhere or not at all."""
