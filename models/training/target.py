"""Loads a target from its Hugging Face folder into PyTorch, with frozen parameters.

Norms and the residual stream are float32, as in training. Weights that MLX has quantised are dequantised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.training.llama import Llama
from models.training.quantise import dequantise
from models.training.recipe import Shape
from outrider.protocol.errors import ModelError

FAMILIES = ("llama", "mistral")


def load_target(folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Llama:
    """Returns the model in `folder` with matrices of this `dtype`.

    Raises:
        ModelError: the model is not a plain Llama, or can't be read.
    """
    model = Llama(load_shape(folder), seed=0)
    parameters = model.state_dict()
    weights = _weights(folder, parameters)
    missing = sorted(parameters.keys() - weights.keys())
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing[:3])}; expected all of a Llama's weights")
    model.load_state_dict(weights)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() >= 2:
            parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


def load_shape(folder: Path) -> Shape:
    """Returns the shape of the model in `folder`. Raises ModelError if it is not a plain Llama."""
    return _shape(_config(folder), folder)


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no readable config.json; expected a model in Hugging Face layout") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in FAMILIES:
        raise ModelError(f"{folder} has a {kind} model; expected one of {', '.join(FAMILIES)}")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    unusual = [key for key in ("attention_bias", "mlp_bias", "sliding_window") if config.get(key)]
    unusual += ["rope_scaling"] if scaling.get("rope_type", "default") != "default" else []
    if unusual:
        raise ModelError(f"{folder} has {', '.join(unusual)}; expected a plain Llama without these")
    return config


def _shape(config: Mapping[str, Any], folder: Path) -> Shape:
    rope = config.get("rope_parameters") or {}
    try:
        heads = int(config["num_attention_heads"])
        return Shape(
            hidden=int(config["hidden_size"]),
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            mlp=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            norm_epsilon=float(config["rms_norm_eps"]),
            rope_base=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
            tied=bool(config.get("tie_word_embeddings", True)),
            own_head_dim=config.get("head_dim"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{folder / 'config.json'} lacks {error}; expected a Llama's sizes") from error


def _weights(folder: Path, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of these `parameters` that the folder has, dequantised, as float32."""
    tensors: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= {key.removeprefix("model."): value for key, value in load_file(file).items()}
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} can't be read ({error}); fetch the model again") from error
    weights = {}
    for name in parameters.keys() & tensors.keys():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in tensors:
            bits = 32 * tensors[name].shape[1] // parameters[name].shape[1]
            if bits not in (4, 8):
                raise ModelError(f"{folder} has weights of {bits} bits; expected 4, 8 or 16")
            weights[name] = dequantise(tensors[name], tensors[f"{stem}.scales"], tensors[f"{stem}.biases"], bits)
        else:
            weights[name] = tensors[name].float()
    return weights
