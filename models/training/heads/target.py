"""Reads a target from its Hugging Face folder, frozen, in PyTorch.

Matrices are bfloat16, norms and the residual stream float32, as in training.
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
from models.training.recipe import Shape
from outrider.protocol.errors import ModelError

FAMILIES = ("llama", "mistral")


def read_target(folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Llama:
    """Returns the model in `folder`, with matrices as `dtype`. Raises ModelError for a model without support."""
    shape = _shape(_config(folder), folder)
    model = Llama(shape, seed=0)
    wanted = model.state_dict()
    weights = _weights(folder, wanted)
    missing = sorted(set(wanted) - set(weights))
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing[:3])}; expected all of a Llama's weights")
    model.load_state_dict(weights)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.dim() >= 2:
            parameter.data = parameter.data.to(dtype)
    return model.to(device).eval()


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no readable config.json; expected a model in Hugging Face layout") from error
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in FAMILIES:
        raise ModelError(f"{folder} holds a {kind} model; heads are made for Llama-like ones: {', '.join(FAMILIES)}")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    unusual = [key for key in ("attention_bias", "mlp_bias", "sliding_window") if config.get(key)]
    unusual += ["rope_scaling"] if scaling.get("rope_type", "default") != "default" else []
    if unusual:
        raise ModelError(f"{folder} has {', '.join(unusual)}; heads are made for plain Llamas, unscaled")
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


def _weights(folder: Path, wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns those of the `wanted` weights that the folder has."""
    found: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            found |= {key.removeprefix("model."): value for key, value in load_file(file).items()}
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} can't be read ({error}); fetch the model again") from error
    return {
        key: _whole(*parts, columns=place.shape[1]) if len(parts) > 1 else found[key].float()
        for key, place in wanted.items()
        if key in found
        for stem in (key.removesuffix(".weight"),)
        for parts in ([found[name] for name in (key, f"{stem}.scales", f"{stem}.biases") if name in found],)
    }


def _whole(packed: Tensor, scales: Tensor, biases: Tensor, columns: int) -> Tensor:
    """Returns a matrix that MLX has quantised: 4 or 8 bits per number, w = scale * q + bias by groups.

    Raises:
        ModelError: it has other bits per number.
    """
    octets = packed.view(torch.uint8)
    bits = 8 * octets.shape[1] // columns
    if bits not in (4, 8):
        raise ModelError(f"the target has weights of {bits} bits; expected 4, 8 or 16")
    steps = octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    grouped = steps.unflatten(1, (scales.shape[1], -1)).float()
    return (grouped * scales.float()[..., None] + biases.float()[..., None]).flatten(1)
