"""Converts an mlx-lm checkpoint into a package directory, completely or not at all.

All files are written to a directory next to the destination, which is renamed last. The .mlpackage has several
functions and is built in its final types, so no graph pass runs: this takes seconds, whereas a conversion for each
function takes minutes. It needs coremltools, on any system. An mlx-lm checkpoint with exactly the same numbers can be
written, too, so that a drafter can fall back from Core ML to MLX, or be checked against it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_config

from outrider.drafters.coreml import graph, package
from outrider.drafters.coreml.layout import (
    HEAD_GRID,
    SCRATCH_SLOTS,
    DecoderArchitecture,
    Options,
    PackageLayout,
)
from outrider.drafters.coreml.package import Manifest, coremltools
from outrider.drafters.coreml.weights import EMBEDDING, GROUP, HEAD, Checkpoint, DenseMatrix, Weights, to_mlx
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.version import PACKAGE_VERSION

Progress = Callable[[str, int, int], None]
"""(stage, done, total) within the stage."""
_BYTES = {"fp16": 2.0, "fp32": 4.0, "int8": 1.0, "int4": 0.53}
_BITS = {"int8": 8, "int4": 4}
_MARGIN = 1 << 20


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
    checkpoint = Checkpoint(model, options.weights)
    layout = _layout(checkpoint.architecture, options)
    partial_package = destination.parent / f".{destination.name}.{os.getpid()}.partial"
    try:
        partial_package.mkdir(parents=True)
        _check_space(partial_package, layout, copies=2 if mlx_out else 1)
        manifest, weights = _write(checkpoint, layout, partial_package, progress)
        if mlx_out is not None:
            write_mlx_copy(weights, model, partial_package / "mlx")
            mlx_out.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(partial_package / "mlx", mlx_out)
        partial_package.rename(destination)
    except OSError as error:
        if mlx_out is not None:  # on another disk it may be incomplete
            shutil.rmtree(mlx_out, ignore_errors=True)
        reason = error.strerror or str(error)
        raise ModelError(f"{destination} can't be written ({reason}); free some space and try again") from error
    finally:
        shutil.rmtree(partial_package, ignore_errors=True)
    return manifest


def _layout(sizes: DecoderArchitecture, options: Options) -> PackageLayout:
    if options.context > sizes.max_positions:
        raise InvalidRequest(f"context is {options.context}; this model has {sizes.max_positions} positions")
    slots = -(-(options.context + SCRATCH_SLOTS) // HEAD_GRID) * HEAD_GRID
    return PackageLayout(sizes, options.mode, options.weights, options.context, slots)


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


def _write(
    checkpoint: Checkpoint, layout: PackageLayout, directory: Path, progress: Progress
) -> tuple[Manifest, Weights]:
    rope = checkpoint.rope(layout.context)
    weights = checkpoint.read(partial(progress, "reading weights"))
    np.save(directory / package.EMBEDDING, weights.embedding)
    np.save(directory / package.ROPE, rope)
    np.save(directory / package.EXPECTED, checkpoint.expected_logits(weights))
    _write_mlpackage(layout, weights, directory, partial(progress, "building"))
    progress("checking", 0, 1)
    manifest = Manifest(
        layout=layout,
        source=checkpoint.path.resolve().name,
        source_hash=package.fingerprint(checkpoint.path),
        parameters=weights.parameters,
        files=package.file_hashes(directory),
        versions={"outrider": PACKAGE_VERSION, **{name: version(name) for name in ("coremltools", "mlx", "mlx-lm")}},
        notes=weights.notes,
    )
    manifest.write(directory)
    progress("checking", 1, 1)
    return manifest, weights


def _write_mlpackage(
    layout: PackageLayout, weights: Weights, directory: Path, progress: Callable[[int, int], None]
) -> None:
    """Saves every function of `layout`; `progress` counts them, and the export as the last step.

    Raises:
        OSError: the disk is full or not writable.
    """
    program, steps = coremltools(".converters.mil.mil").Program(), len(layout.functions) + 1
    constants = graph.Constants(weights)
    for built, function in enumerate(layout.functions):
        program.add_function(function.name, graph.build(layout, constants, function))
        progress(built + 1, steps)
    program.default_function_name = layout.functions[0].name
    program.export_as_multifunction = True
    tools, export = coremltools(), coremltools(".converters.mil.backend.mil.load").load
    # weight.bin is written here first, so it must be on the disk whose space was checked
    with tempfile.TemporaryDirectory(dir=directory) as weights_dir:
        try:
            spec = export(program, weights_dir, specification_version=tools.target.iOS18.value)
            tools.utils.save_spec(spec, str(directory / package.MLPACKAGE), weights_dir=weights_dir)
        except RuntimeError as error:  # coremltools' writers raise it if the disk is full
            raise OSError(errno.EIO, str(error)) from error
    progress(steps, steps)


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
        names = (f"{module}.{part}" for part in ("weight", "scales", "biases"))
        arrays |= zip(names, to_mlx(form), strict=True)
    mx.save_safetensors(str(destination / "model.safetensors"), arrays, metadata={"format": "mlx"})
    config = {key: value for key, value in load_config(source).items() if not key.startswith("quantization")}
    config["torch_dtype"] = "float32" if weights.kind == "fp32" else "float16"
    if weights.kind in _BITS:
        config["quantization"] = {"group_size": GROUP, "bits": _BITS[weights.kind]}
    (destination / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith("model") and file.name != "config.json":
            shutil.copy(file, destination / file.name)
