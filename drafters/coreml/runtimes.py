"""Runs a package: the interface of runtimes, Core ML itself (macOS), and the host that feeds them.

`CoreMLRuntime` has one compiled model for each function, all loaded before the first call. coremltools' predict holds
the GIL for the whole call, and releases inputs late, on Core ML's own queue. So its worker is a process of its own,
every call comes from one thread, and input buffers outlive it.

Tests of machines without Core ML name a module in the environment (STAND_IN), whose `open_runtime` replaces Core ML's.

`has_engine` and `engine_share` report whether there is a Neural Engine, and which operations Core ML plans for it.

`PackageHost` calls a package's functions with tokens: it embeds, rotates, masks, and owns the caches. Each call has a
mask row by row, so trees, ragged lengths and rollback are only data here. Each function has one set of input buffers,
which is reused. Everything runs on the caller's thread.

`LinearCache` feeds one text without a tree: slot i holds position i. `PackageReader` reads a prompt in an MLX model's
place: the package has keys and values in MLX's form, [kv_heads, position, head_dim] after the rotation, so nothing is
transposed or computed again; only float16 rounding differs from MLX's own reading.
"""

from __future__ import annotations

import importlib
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.layout import Mode, PackageFunction, PackageLayout
from outrider.drafters.coreml.package import Package, coremltools
from outrider.drafters.drafter import DrafterFault
from outrider.engine.kv_transfer import KeysValues, ReadingFault
from outrider.protocol.errors import ModelError, OutriderError, WorkerError, first_line

Inputs = Mapping[str, NDArray[Any]]
Outputs = dict[str, NDArray[np.float32]]


RuntimeState = Any
"""One request's cache inside a runtime; opaque to the host."""


class Runtime(Protocol):
    """Runs the functions of one package. Every call comes from the same thread.

    `name`: the runtime and its device, for users. `compile_seconds`: the time it took to compile the package now.
    """

    name: str
    compile_seconds: float

    def new_state(self) -> RuntimeState | None:
        """Returns an empty cache; None for a package whose cache is owned by the host."""
        ...

    def call(self, function: str, inputs: Inputs, state: RuntimeState | None) -> Outputs:
        """Runs `function`. Inputs are float32 (int32 for positions) of the shapes in the package's layout.

        The input arrays remain the caller's: it may write to them after the call, and must never free them between
        calls. Raises RuntimeFault if the device fails.
        """
        ...


class DeviceAbsent(ModelError):
    """This machine lacks the device, for any package."""


class RuntimeFault(WorkerError):
    """The device that runs a package failed."""


UNITS = ("CPU_AND_NE", "CPU_AND_GPU", "CPU_ONLY", "ALL")
STAND_IN = "OUTRIDER_COREML_STAND_IN"
ABSENT = "Core ML runs on macOS only"
_OFF = "; drafting is off for this request"
_CONSTANTS = ("const", "constexpr")


def available() -> bool:
    """Returns whether packages can run on this system."""
    return sys.platform == "darwin" or STAND_IN in os.environ


def open_runtime(package: Package, units: str, functions: Sequence[str] | None = None) -> Runtime:
    """Returns a runtime for `package` on `units`, one of UNITS.

    Args:
        functions: only these (default: all); each takes time and memory to load.

    Raises:
        DeviceAbsent: this is not a Mac.
        ModelError: Core ML refuses the package, or its directory can't be written to.
    """
    stand_in = os.environ.get(STAND_IN)
    if stand_in is not None:
        runtime: Runtime = importlib.import_module(stand_in).open_runtime(package)
        return runtime
    return CoreMLRuntime(package, units, functions)


class CoreMLRuntime:
    """A `Runtime` of Core ML; see `open_runtime`."""

    def __init__(self, package: Package, units: str, functions: Sequence[str] | None = None) -> None:
        self.name = f"Core ML on {units}"
        self._stateful = package.layout.mode.stateful
        started = time.monotonic()
        compiled = compiled_path(package)
        self.compile_seconds = time.monotonic() - started
        tools = coremltools()
        with _errors_named(f"Core ML can't load {package.path} on {units}"):
            self._models = {
                name: tools.models.CompiledMLModel(
                    str(compiled),
                    compute_units=tools.ComputeUnit[units],
                    function_name=name,
                    optimization_hints={"specializationStrategy": tools.SpecializationStrategy.FastPrediction},
                )
                for name in functions or [function.name for function in package.layout.functions]
            }

    def new_state(self) -> RuntimeState | None:
        if not self._stateful:
            return None
        with _errors_named(f"{self.name} failed", RuntimeFault, _OFF):
            state: RuntimeState = next(iter(self._models.values())).make_state()
        return state

    def call(self, function: str, inputs: Inputs, state: RuntimeState | None) -> Outputs:
        model = self._models.get(function)
        if model is None:
            raise RuntimeFault(f"the function {function} was not loaded; loaded are {', '.join(self._models)}")
        with _errors_named(f"{self.name} failed", RuntimeFault, _OFF):
            outputs = model.predict(dict(inputs), state)
        return {name: np.asarray(array, np.float32) for name, array in outputs.items()}


@contextmanager
def _errors_named(what: str, kind: type[OutriderError] = ModelError, then: str = "") -> Iterator[None]:
    """Raises `kind` with one sentence for any error of coremltools, which raises Exception itself."""
    try:
        yield
    except Exception as error:
        raise kind(f"{what}: {first_line(error)}{then}") from error


def compiled_path(package: Package) -> Path:
    """Returns the compiled model next to the package, compiled if it is missing; one for each build of macOS.

    Raises:
        DeviceAbsent: this is not a Mac.
        ModelError: Core ML refuses the package, or its directory can't be written to.
    """
    if sys.platform != "darwin":
        raise DeviceAbsent(ABSENT)
    path = package.path.resolve() / f"compiled-{os_build()}.mlmodelc"
    if path.is_dir():
        return path
    try:
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            partial = Path(directory) / "model.mlmodelc"
            with _errors_named(f"Core ML can't compile {package.path}"):
                coremltools().models.utils.compile_model(str(package.mlpackage), str(partial))
            with suppress(OSError):  # another process was faster, with the same result
                partial.rename(path)
    except OSError as error:
        raise ModelError(f"{package.path} can't be written to ({error}); compiled models are kept there") from error
    return path


def os_build() -> str:
    """Returns macOS's build number (elsewhere the kernel's release): a plan of one build is not valid for another."""
    if sys.platform != "darwin":
        return platform.release()
    command = ["/usr/bin/sw_vers", "-buildVersion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    return done.stdout.strip() or platform.mac_ver()[0]


def has_engine() -> bool:
    """Whether there is a Neural Engine. Raises ModelError if Core ML does not report its devices."""
    devices = coremltools(".models.compute_device")
    with _errors_named("Core ML does not answer"):
        present = devices.MLComputeDevice.get_all_compute_devices()
        return any(isinstance(device, devices.MLNeuralEngineComputeDevice) for device in present)


def engine_share(package: Package, units: str) -> dict[str, float]:
    """Returns, for each function with a plan, the share of its operations planned for the Neural Engine.

    Raises:
        ModelError: Core ML makes no plan for the package.
    """
    compiled, shares = compiled_path(package), {}
    devices, plans = coremltools(".models.compute_device"), coremltools(".models.compute_plan")
    with _errors_named("Core ML does not answer"):
        plan = plans.MLComputePlan.load_from_path(str(compiled), coremltools().ComputeUnit[units])
        program = plan.model_structure.program
        for name, function in program.functions.items() if program is not None else ():
            placed = []
            for operation in function.block.operations:
                usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
                constant = operation.operator_name.split(".")[-1].startswith(_CONSTANTS)
                if usage is not None and not constant:
                    placed.append(isinstance(usage.preferred_compute_device, devices.MLNeuralEngineComputeDevice))
            if placed:  # a plan reports nothing for functions that it does not cover
                shares[name] = round(sum(placed) / len(placed), 4)
    return shares


MASKED = -1e4  # float16 can hold it, and exp() of it is 0


@dataclass(slots=True)
class PackageCache:
    """One request's keys and values: arrays [layers, kv_heads, slots, head_dim], or a `state` of the runtime."""

    keys: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    state: RuntimeState | None = None


@dataclass(frozen=True, slots=True)
class HostRows:
    """The R tokens of one call.

    `slots`: the slot of each one's keys and values. `past` [R, slots]: the slots that each sees, as they were before
    the call. `own` [R, R]: the rows of the call that each sees, including itself.
    """

    tokens: list[int]
    positions: list[int]
    slots: list[int]
    past: NDArray[np.bool_]
    own: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CallOutput:
    """A call's result: `logits` [R, vocab] from functions that have them; `keys` and `values` [layers, kv_heads, R,
    head_dim] from packages that return them."""

    logits: NDArray[np.float32] | None
    keys: NDArray[np.float32] | None
    values: NDArray[np.float32] | None


def cache_bytes(layout: PackageLayout) -> int:
    """Returns the size of a request's keys and values in float32, which does not depend on the text's length."""
    return 2 * 4 * math.prod(layout.cache_shape)


class PackageHost:
    """Runs `package` on `runtime`."""

    def __init__(self, package: Package, runtime: Runtime) -> None:
        self.package = package
        self.layout = package.layout
        self._runtime = runtime
        self._buffers: dict[str, dict[str, NDArray[Any]]] = {}
        self._spare: list[PackageCache] = []
        cos, sin = package.rope
        self._cos = np.concatenate([cos, cos], axis=-1)
        self._sin = np.concatenate([-sin, sin], axis=-1)  # the graph rotates by x cos + swap(x) sin

    def new_cache(self) -> PackageCache:
        """Returns an empty cache. Buffers of closed ones are reused, because a device may read them after a call."""
        if self.layout.mode.stateful:
            return PackageCache(state=self._runtime.new_state())
        if self._spare:
            return self._spare.pop()
        return PackageCache(*(np.zeros(self.layout.cache_shape, np.float32) for _ in range(2)))

    def give_back(self, cache: PackageCache) -> None:
        if not self.layout.mode.stateful:
            self._spare.append(cache)

    def forward(self, rows: HostRows, cache: PackageCache, function: PackageFunction) -> CallOutput:
        """Feeds `rows` (at most the function's) and writes their keys and values into `cache`.

        Raises:
            DrafterFault: the logits are not finite.
            RuntimeFault: the device failed.
        """
        buffers = self._filled(function, rows)
        if self.layout.mode is Mode.STATELESS:
            buffers |= {"k_past": cache.keys, "v_past": cache.values}
        outputs = self._runtime.call(function.name, buffers, cache.state)
        fresh = self._fresh(function, outputs, len(rows.tokens))
        if self.layout.mode is Mode.STATELESS and cache.keys is not None and cache.values is not None:
            cache.keys[:, :, rows.slots], cache.values[:, :, rows.slots] = fresh.keys, fresh.values
        return fresh

    def _filled(self, function: PackageFunction, rows: HostRows) -> dict[str, Any]:
        """Returns the function's buffers filled with `rows`; further rows are masked and written nowhere."""
        if function.name not in self._buffers:
            self._buffers[function.name] = self._new_buffers(function)
        buffers, count, slots = self._buffers[function.name], len(rows.tokens), self.layout.slots
        buffers["x"][:] = 0
        buffers["x"][0, :, 0, :count] = self.package.embedding[rows.tokens].T
        buffers["cos"][0, 0, :count] = self._cos[rows.positions]
        buffers["sin"][0, 0, :count] = self._sin[rows.positions]
        mask = buffers["mask"][0, 0]
        mask[:] = MASKED
        mask[:count, :slots][rows.past] = 0
        mask[:count, slots : slots + count][rows.own] = 0
        if self.layout.mode is Mode.HYBRID:
            buffers["pos"][0] = rows.slots[0]
        if self.layout.mode is Mode.ONEHOT:
            buffers["write"][:] = 0
            buffers["write"][0, 0, rows.slots, np.arange(count)] = 1
        return dict(buffers)

    def _new_buffers(self, function: PackageFunction) -> dict[str, NDArray[Any]]:
        return {
            tensor.name: np.zeros(tensor.shape, np.int32 if tensor.integer else np.float32)
            for tensor in self.layout.inputs(function)
            if not tensor.name.endswith("_past")
        }

    def _fresh(self, function: PackageFunction, outputs: Outputs, count: int) -> CallOutput:
        keys, values = outputs.get("k_new"), outputs.get("v_new")
        logits = None
        if function.logits:
            chunks = range(len(self.layout.architecture.head_chunks))
            logits = np.concatenate([outputs[f"logits_{chunk}"][0, :, 0, :count] for chunk in chunks]).T
            if not np.isfinite(logits).all():
                raise DrafterFault(
                    f"{self._runtime.name} returned logits that are NaN or infinite; drafting is off for this request"
                )
        return CallOutput(
            logits,
            None if keys is None else keys[:, :, :count],
            None if values is None else values[:, :, :count],
        )


class LinearCache:
    """Reads a text through `host`, on the thread that created this object."""

    def __init__(self, host: PackageHost) -> None:
        self._host = host
        self._cache = host.new_cache()
        self._seen = np.zeros(host.layout.slots, bool)
        self.length = 0

    def feed(self, tokens: Sequence[int], function: PackageFunction) -> CallOutput:
        """Feeds the next tokens, at most as many as `function` has rows."""
        positions = list(range(self.length, self.length + len(tokens)))
        past = np.broadcast_to(self._seen, (len(positions), self._seen.size))
        own = np.tri(len(positions), dtype=bool)
        fresh = self._host.forward(HostRows(list(tokens), positions, positions, past, own), self._cache, function)
        self._seen[positions] = True
        self.length += len(positions)
        return fresh

    def close(self) -> None:
        self._host.give_back(self._cache)


class PackageReader:
    """An `engine.kv_transfer.PromptReader` that runs `package`, which must have the model's weights, on `runtime`.

    Args:
        least: the model itself reads shorter prompts.
    """

    def __init__(self, package: Package, runtime: Runtime, least: int) -> None:
        self.least, self.package = least, package
        self.note = f"prompts of {least} tokens and more are read by {runtime.name}"
        self._host = PackageHost(package, runtime)
        self._name = runtime.name

    def readable(self, count: int) -> int:
        """Returns how many tokens of a prompt the package reads: none if it is too short, at most its context."""
        return min(count, self._host.layout.context) if count >= self.least else 0

    def read(self, tokens: Sequence[int]) -> Iterator[KeysValues]:
        prefill, line = self._host.layout.prefill, LinearCache(self._host)
        try:
            for first in range(0, len(tokens), prefill.rows):
                fresh = line.feed(tokens[first : first + prefill.rows], prefill)
                if fresh.keys is None or fresh.values is None:
                    raise ReadingFault(f"{prefill.name} returns no keys")
                if not (np.isfinite(fresh.keys).all() and np.isfinite(fresh.values).all()):
                    raise ReadingFault(f"{self._name} returned keys that are NaN or infinite")
                yield KeysValues(fresh.keys, fresh.values)
        except OutriderError as error:
            raise ReadingFault(f"the prompt can't be read by the package: {error}") from error
        finally:
            line.close()
