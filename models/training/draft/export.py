"""Writes and reads trained drafts in the repository's format: layers in 4 bits, norms, and their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.training.draft.quantise import BITS, GROUP, packed, quantise, unpacked
from models.training.recipe import Shape
from outrider.protocol.errors import ModelError


def write(folder: Path, weights: dict[str, Tensor], outputs: Tensor, target: Shape, about: dict[str, Any]) -> None:
    """Writes config.json, model.safetensors and training.json (with the content `about`) into the new `folder`."""
    tensors: dict[str, Tensor] = {"d2t": (outputs.cpu() - torch.arange(len(outputs))).int()}
    for name, value in weights.items():
        tensor = value.detach().float().cpu()
        if name == "lens":
            tensors[name] = tensor.half()
            continue
        if tensor.dim() < 2:
            tensors[f"model.{name}"] = tensor.half()
            continue
        steps, scales, biases = quantise(tensor)
        stem = f"model.{name.removesuffix('.weight')}"
        tensors |= {f"{stem}.weight": packed(steps), f"{stem}.scales": scales, f"{stem}.biases": biases}
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "mlx"})
    mlp = weights["layers.0.mlp.gate_proj.weight"].shape[0]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    _write_json(folder / "config.json", _config(target, layers, mlp, len(outputs)))
    _write_json(folder / "training.json", about)


def read(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the parameters and the tokens of the draft in `folder`. Raises ModelError if there is none."""
    try:
        tensors = load_file(folder / "model.safetensors")
        tokens = tensors.pop("d2t").long()
    except (OSError, KeyError) as error:
        raise ModelError(f"{folder} has no draft that was trained here ({error})") from error
    weights: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix("model.")
        stem = key.removesuffix(".weight")
        if f"{stem}.scales" in tensors and key.endswith(".weight"):
            weights[name] = unpacked(tensor, tensors[f"{stem}.scales"], tensors[f"{stem}.biases"])
        elif not key.endswith((".scales", ".biases")):
            weights[name] = tensor.float()
    return weights, tokens + torch.arange(len(tokens))


def _config(shape: Shape, layers: int, mlp: int, outputs: int) -> dict[str, Any]:
    quantisation = {"group_size": GROUP, "bits": BITS}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": layers,
        "intermediate_size": mlp,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_epsilon,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": True,
        "rope_theta": shape.rope_base,
        "max_position_embeddings": shape.context,
        "torch_dtype": "float16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "embedding": "target",
        "draft_vocab_size": outputs,
        "quantization": quantisation,
        "quantization_config": quantisation,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
