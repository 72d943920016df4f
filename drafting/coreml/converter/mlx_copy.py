"""Writes a package's weights as an mlx-lm checkpoint too: the very same numbers on the MLX side.

The drafter can then fall back from Core ML to MLX, or be checked against it, without a change of weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_config

from outrider.drafting.coreml.converter.quantize import GROUP, Dense, to_mlx
from outrider.drafting.coreml.converter.weights import EMBEDDING, HEAD, Weights
from outrider.protocol.errors import ModelError

_BITS = {"int8": 8, "int4": 4}


def write(weights: Weights, source: Path, destination: Path) -> None:
    """The mlx-lm checkpoint of `weights` in the new directory `destination`; config and tokenizer from `source`.

    Raises:
        ModelError: the width of a matrix does not divide into MLX's groups.
    """
    destination.mkdir(parents=True)
    arrays = {name: mx.array(vector) for name, vector in weights.vectors.items()}
    if not weights.architecture.tied:
        arrays[f"{EMBEDDING}.weight"] = mx.array(weights.embedding)
    for name, form in weights.matrices.items():
        module = EMBEDDING if name == HEAD and weights.architecture.tied else name
        if isinstance(form, Dense):
            arrays[f"{module}.weight"] = mx.array(form.values)
            continue
        if form.data.shape[1] % GROUP:
            raise ModelError(f"{name} has {form.data.shape[1]} columns; MLX needs a multiple of {GROUP} to quantise it")
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
