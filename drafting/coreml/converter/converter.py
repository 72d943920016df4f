"""Turns an mlx-lm checkpoint into a package directory, all of it or nothing.

Everything is written to a directory beside the destination, which is renamed last. Knows each step's name for the
person who waits; knows nothing of terminals.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from outrider.drafting.coreml.converter import mlpackage, mlx_copy
from outrider.drafting.coreml.converter.weights import WeightReader, Weights
from outrider.drafting.coreml.package import package, rope, source
from outrider.drafting.coreml.package.architecture import HEAD_GRID, MAX_WIDTH
from outrider.drafting.coreml.package.layout import PREFILL_ROWS, SCRATCH_SLOTS, Layout, Mode
from outrider.drafting.coreml.package.manifest import Manifest
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.version import PACKAGE_VERSION

Progress = Callable[[str, int, int], None]
"""(stage, done, total) within the stage."""

DEFAULT_CONTEXT = 1024
_BYTES = {"fp16": 2.0, "fp32": 4.0, "int8": 1.0, "int4": 0.53}
_MARGIN = 1 << 20
_LONGEST = MAX_WIDTH - SCRATCH_SLOTS - PREFILL_ROWS  # the mask is slots and rows wide


@dataclass(frozen=True, slots=True)
class Options:
    """What to make: see layout.Mode and weights.KINDS; `context` in tokens.

    Raises:
        InvalidRequest: these do not go together.
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
        mlx_out: a directory for an mlx-lm checkpoint of the very same numbers, or None.

    Raises:
        InvalidRequest: `destination` or `mlx_out` is there already.
        ModelError: the model is refused, or the disk can't hold the package; nothing is left behind then.
    """
    progress = progress or (lambda stage, done, total: None)
    for path in (destination, mlx_out):
        if path is not None and path.exists():
            raise InvalidRequest(f"{path} already exists; remove it, or choose another folder")
    progress("reading", 0, 1)
    opened = source.open_source(model)
    layout = _layout(opened, options)
    partial = destination.parent / f".{destination.name}.{os.getpid()}.partial"
    partial_mlx = partial / "mlx"
    try:
        partial.mkdir(parents=True)
        _check_space(partial, layout, copies=2 if mlx_out else 1)
        manifest, weights = _write(opened, layout, partial, progress)
        if mlx_out is not None:
            mlx_copy.write(weights, model, partial_mlx)
            mlx_out.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(partial_mlx, mlx_out)
        partial.rename(destination)
    except OSError as error:
        if mlx_out is not None:  # it may lie on another disk, and have come half-way
            shutil.rmtree(mlx_out, ignore_errors=True)
        raise _disk_error(destination, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _layout(opened: source.Source, options: Options) -> Layout:
    sizes = opened.architecture
    if options.context > sizes.max_positions:
        raise InvalidRequest(f"context is {options.context}; this model knows {sizes.max_positions} positions")
    slots = -(-(options.context + SCRATCH_SLOTS) // HEAD_GRID) * HEAD_GRID
    return Layout(sizes, options.mode, options.weights, options.context, slots)


def _write(opened: source.Source, layout: Layout, directory: Path, progress: Progress) -> tuple[Manifest, Weights]:
    first = opened.model.model.layers[0].self_attn
    table = rope.probe(first.rope, layout.architecture.head_dim, layout.context)
    weights = WeightReader(opened.model, layout.architecture, layout.weights).read(
        lambda done, total: progress("reading weights", done, total)
    )
    np.save(directory / package.EMBEDDING, weights.embedding)
    np.save(directory / package.ROPE, np.stack([table.cos, table.sin]))
    mlpackage.write(
        layout, weights, directory / package.MLPACKAGE, lambda done, total: progress("building", done, total)
    )
    progress("checking", 0, 1)
    manifest = Manifest(
        layout=layout,
        source=opened.path.resolve().name,
        source_hash=source.fingerprint(opened.path),
        parameters=weights.parameters,
        files=package.file_hashes(directory),
        versions={"outrider": PACKAGE_VERSION, **{name: version(name) for name in ("coremltools", "mlx", "mlx-lm")}},
        notes=weights.notes,
    )
    manifest.write(directory)
    progress("checking", 1, 1)
    return manifest, weights


def _check_space(directory: Path, layout: Layout, copies: int) -> None:
    """Refuses early where the disk can't hold the weights twice, as they are while the package is put together."""
    sizes = layout.architecture
    heads = sizes.head_dim * (sizes.heads + sizes.kv_heads)
    matrices = sizes.layers * sizes.hidden * (2 * heads + 3 * sizes.intermediate) + sizes.vocab_size * sizes.hidden
    table = sizes.vocab_size * sizes.hidden * (4 if layout.weights == "fp32" else 2)
    needed = int(matrices * _BYTES[layout.weights] * (1 + copies)) + table * copies + _MARGIN
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{free >> 20} MiB free, but about {needed >> 20} MiB are needed")


def _disk_error(destination: Path, error: OSError) -> ModelError:
    what = error.strerror or str(error)
    return ModelError(f"{destination} can't be written ({what}); free some space and try again")
