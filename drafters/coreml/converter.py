"""Converts an mlx-lm checkpoint into a package directory, completely or not at all.

All files are written to a directory next to the destination, which is renamed last. `progress` receives each step's
name.

`write_mlpackage` writes graphs and weights as a multifunction .mlpackage. The program is built in its final types, so
no graph pass runs: this takes seconds, whereas a conversion for each function takes minutes. It needs coremltools, on
any system. `write_mlx_copy` also writes the weights as an mlx-lm checkpoint with exactly the same numbers, so that a
drafter can fall back from Core ML to MLX, or be checked against it. `package_of` converts a draft model when its
package is first needed, and keeps it under `root`.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_config

from outrider.drafters.coreml import graph, package, saved
from outrider.drafters.coreml.graph import Constants
from outrider.drafters.coreml.layout import (
    HEAD_GRID,
    MAX_WIDTH,
    PREFILL_ROWS,
    SCRATCH_SLOTS,
    Mode,
    PackageLayout,
)
from outrider.drafters.coreml.package import Manifest, Package, open_package
from outrider.drafters.coreml.weights import (
    EMBEDDING,
    GROUP,
    HEAD,
    DenseMatrix,
    WeightReader,
    Weights,
    to_mlx,
)
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.version import PACKAGE_VERSION


def write_mlpackage(
    layout: PackageLayout, weights: Weights, destination: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Saves every function of `layout` to `destination` (a new directory ending in .mlpackage).

    Args:
        progress: called with (functions built, functions + 1); the last step is the export.

    Raises:
        OSError: the disk is full or not writable.
    """
    program, steps = saved.mil().Program(), len(layout.functions) + 1
    constants = Constants(weights)
    for built, function in enumerate(layout.functions):
        program.add_function(function.name, graph.build(layout, constants, function))
        if progress:
            progress(built + 1, steps)
    program.default_function_name = layout.functions[0].name
    program.export_as_multifunction = True
    coremltools = saved.coremltools()
    export = importlib.import_module("coremltools.converters.mil.backend.mil.load").load
    # weight.bin is written here first, so it must be on the disk whose space was checked
    with tempfile.TemporaryDirectory(dir=destination.parent) as weights_dir:
        try:
            spec = export(program, weights_dir, specification_version=coremltools.target.iOS18.value)
            coremltools.utils.save_spec(spec, str(destination), weights_dir=weights_dir)
        except RuntimeError as error:  # coremltools' writers raise it if the disk is full
            raise OSError(errno.EIO, str(error)) from error
    if progress:
        progress(steps, steps)


_BITS = {"int8": 8, "int4": 4}


def write_mlx_copy(weights: Weights, source: Path, destination: Path) -> None:
    """Writes `weights` as an mlx-lm checkpoint to a new directory, with config and tokenizer from `source`.

    Raises:
        ModelError: the width of a matrix does not divide into MLX's groups.
    """
    destination.mkdir(parents=True)
    arrays = {name: mx.array(vector) for name, vector in weights.vectors.items()}
    if not weights.architecture.tied:
        arrays[f"{EMBEDDING}.weight"] = mx.array(weights.embedding)
    for name, form in weights.matrices.items():
        module = EMBEDDING if name == HEAD and weights.architecture.tied else name
        if isinstance(form, DenseMatrix):
            arrays[f"{module}.weight"] = mx.array(form.values)
            continue
        if form.data.shape[1] % GROUP:
            raise ModelError(f"{name} has {form.data.shape[1]} columns; MLX needs a multiple of {GROUP} to quantize it")
        triple = to_mlx(form)
        for part, array in (("weight", triple.weight), ("scales", triple.scales), ("biases", triple.biases)):
            arrays[f"{module}.{part}"] = array
    mx.save_safetensors(str(destination / "model.safetensors"), arrays, metadata={"format": "mlx"})
    (destination / "config.json").write_text(json.dumps(_config(weights, source), indent=1), encoding="utf-8")
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model") and file.name != "config.json":
            shutil.copy(file, destination / file.name)


def _config(weights: Weights, source: Path) -> dict[str, Any]:
    config = {key: value for key, value in load_config(source).items() if not key.startswith("quantization")}
    config["torch_dtype"] = "float32" if weights.kind == "fp32" else "float16"
    if weights.kind in _BITS:
        config["quantization"] = {"group_size": GROUP, "bits": _BITS[weights.kind]}
    return config


Progress = Callable[[str, int, int], None]
"""(stage, done, total) within the stage."""

DEFAULT_CONTEXT = 1024
_BYTES = {"fp16": 2.0, "fp32": 4.0, "int8": 1.0, "int4": 0.53}
_MARGIN = 1 << 20
_LONGEST = MAX_WIDTH - SCRATCH_SLOTS - PREFILL_ROWS  # the width of the mask is that of slots and rows


@dataclass(frozen=True, slots=True)
class Options:
    """The kind of package: see layout.Mode and weights.KINDS; `context` in tokens.

    Raises:
        InvalidRequest: a value is invalid, or two exclude each other.
    """

    mode: Mode = Mode.STATELESS
    weights: str = "fp16"
    context: int = DEFAULT_CONTEXT

    def __post_init__(self) -> None:
        if self.weights not in _BYTES:
            raise InvalidRequest(f"weights is {self.weights!r}; expected one of {', '.join(_BYTES)}")
        if not PREFILL_ROWS <= self.context <= _LONGEST:
            raise InvalidRequest(f"context is {self.context}; expected {PREFILL_ROWS} to {_LONGEST} tokens")
        if self.weights == "fp32" and self.mode.stateful:
            raise InvalidRequest("Core ML keeps states in float16 only; weights fp32 need --mode stateless")


def convert(
    model: Path, destination: Path, options: Options, progress: Progress | None = None, mlx_out: Path | None = None
) -> Manifest:
    """Writes the package of the checkpoint `model` to `destination`, which must not exist.

    Args:
        mlx_out: a directory for an mlx-lm checkpoint with the same numbers, or None.

    Raises:
        InvalidRequest: `destination` or `mlx_out` exists already.
        ModelError: the model is refused, or the disk can't hold the package; nothing is left then.
    """
    progress = progress or (lambda stage, done, total: None)
    for path in (destination, mlx_out):
        if path is not None and path.exists():
            raise InvalidRequest(f"{path} already exists; remove it, or choose another folder")
    progress("reading", 0, 1)
    opened = package.open_source(model)
    layout = _layout(opened, options)
    partial = destination.parent / f".{destination.name}.{os.getpid()}.partial"
    partial_mlx = partial / "mlx"
    try:
        partial.mkdir(parents=True)
        _check_space(partial, layout, copies=2 if mlx_out else 1)
        manifest, weights = _write(opened, layout, partial, progress)
        if mlx_out is not None:
            write_mlx_copy(weights, model, partial_mlx)
            mlx_out.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(partial_mlx, mlx_out)
        partial.rename(destination)
    except OSError as error:
        if mlx_out is not None:  # on another disk it may be incomplete
            shutil.rmtree(mlx_out, ignore_errors=True)
        raise _disk_error(destination, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _layout(opened: package.CheckpointSource, options: Options) -> PackageLayout:
    sizes = opened.architecture
    if options.context > sizes.max_positions:
        raise InvalidRequest(f"context is {options.context}; this model has {sizes.max_positions} positions")
    slots = -(-(options.context + SCRATCH_SLOTS) // HEAD_GRID) * HEAD_GRID
    return PackageLayout(sizes, options.mode, options.weights, options.context, slots)


def _write(
    opened: package.CheckpointSource, layout: PackageLayout, directory: Path, progress: Progress
) -> tuple[Manifest, Weights]:
    first = opened.model.model.layers[0].self_attn
    table = package.probe(first.rope, layout.architecture.head_dim, layout.context)
    weights = WeightReader(opened.model, layout.architecture, layout.weights).read(
        lambda done, total: progress("reading weights", done, total)
    )
    np.save(directory / package.EMBEDDING, weights.embedding)
    np.save(directory / package.ROPE, np.stack([table.cos, table.sin]))
    write_mlpackage(
        layout, weights, directory / package.MLPACKAGE, lambda done, total: progress("building", done, total)
    )
    progress("checking", 0, 1)
    manifest = Manifest(
        layout=layout,
        source=opened.path.resolve().name,
        source_hash=package.fingerprint(opened.path),
        parameters=weights.parameters,
        files=package.file_hashes(directory),
        versions={"outrider": PACKAGE_VERSION, **{name: version(name) for name in ("coremltools", "mlx", "mlx-lm")}},
        notes=weights.notes,
    )
    manifest.write(directory)
    progress("checking", 1, 1)
    return manifest, weights


def _check_space(directory: Path, layout: PackageLayout, copies: int) -> None:
    """Raises OSError if the disk can't hold the weights twice, as it must while the package is written."""
    sizes = layout.architecture
    heads = sizes.head_dim * (sizes.heads + sizes.kv_heads)
    matrices = sizes.layers * sizes.hidden * (2 * heads + 3 * sizes.intermediate) + sizes.vocab_size * sizes.hidden
    table = sizes.vocab_size * sizes.hidden * (4 if layout.weights == "fp32" else 2)
    needed = int(matrices * _BYTES[layout.weights] * (1 + copies)) + table * copies + _MARGIN
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, but about {needed >> 20} MiB are needed")


def _disk_error(destination: Path, error: OSError) -> ModelError:
    reason = error.strerror or str(error)
    return ModelError(f"{destination} can't be written ({reason}); free some space and try again")


def root() -> Path:
    """Returns the folder of the packages, which can be made again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider" / "coreml"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "coreml"


def probes() -> Path:
    """Returns the folder of the results of trials."""
    return root() / "probes"


def directory_of(source_hash: str, options: Options, folder: Path | None = None) -> Path:
    """Returns the directory of the package of the checkpoint with this `package.fingerprint`."""
    key = f"{source_hash[:16]}-{options.mode.value}-{options.weights}-{options.context}"
    return (folder or root()) / f"{key}-f{package.FORMAT}"


def package_of(model: Path, options: Options, progress: Progress | None = None, folder: Path | None = None) -> Package:
    """Returns the package of the checkpoint `model` from `folder` (default: `root()`); converts it if it is missing.

    Raises:
        ModelError: the model is refused, or can't be converted here.
    """
    directory = directory_of(package.fingerprint(model), options, folder)
    if not directory.exists():
        try:
            convert(model, directory, options, progress)
        except ModelError:
            if not directory.exists():  # otherwise another process has made it meanwhile
                raise
    return open_package(directory, source=model)
