"""Writes and reads trained drafts: layers in 4 bits, norms, lens and vocabulary, without the target's own weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from models.training.export import llama_config
from models.training.quantise import BITS, GROUP_SIZE, dequantise, pack, quantise
from models.training.recipe import Shape
from models.training.storage import write_json
from outrider.protocol.errors import ModelError


def write_draft(
    folder: Path, weights: dict[str, Tensor], vocab_ids: Tensor, target: Shape, about: dict[str, Any]
) -> None:
    """Writes config.json, model.safetensors, and training.json with the content `about` into `folder`.

    `vocab_ids` [V_d]: the target's tokens in the draft's vocabulary.
    """
    tensors = {"d2t": (vocab_ids.cpu() - torch.arange(len(vocab_ids))).int()}
    for name, value in weights.items():
        weight = value.detach().float().cpu()
        if name == "lens":
            tensors[name] = weight.half()
        elif weight.dim() < 2:
            tensors[f"model.{name}"] = weight.half()
        else:
            q, scales, biases = quantise(weight)
            stem = f"model.{name.removesuffix('.weight')}"
            tensors |= {f"{stem}.weight": pack(q), f"{stem}.scales": scales, f"{stem}.biases": biases}
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(save(contiguous, {"format": "mlx"}))
    mlp = weights["layers.0.mlp.gate_proj.weight"].shape[0]
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    write_json(folder / "config.json", _config(target, layers, mlp, len(vocab_ids)))
    write_json(folder / "training.json", about)


def read_draft(folder: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the parameters of the draft in `folder`, and its vocabulary as ids of the target. Raises ModelError if
    there is none."""
    try:
        tensors = load_file(folder / "model.safetensors")
        offsets = tensors.pop("d2t").long()
    except (OSError, KeyError, SafetensorError) as error:
        raise ModelError(f"{folder} has no draft that was trained here ({error})") from error
    weights: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name, stem = key.removeprefix("model."), key.removesuffix(".weight")
        if key.endswith(".weight") and f"{stem}.scales" in tensors:
            weights[name] = dequantise(tensor, tensors[f"{stem}.scales"], tensors[f"{stem}.biases"])
        elif not key.endswith((".scales", ".biases")):
            weights[name] = tensor.float()
    return weights, offsets + torch.arange(len(offsets))


def _config(shape: Shape, layers: int, mlp: int, vocab: int) -> dict[str, Any]:
    """Returns config.json. Embedding and output layer are the target's, which `"embedding": "target"` says."""
    quantisation = {"group_size": GROUP_SIZE, "bits": BITS}
    return {
        **llama_config(replace(shape, layers=layers, mlp=mlp, tied=True)),
        "embedding": "target",
        "draft_vocab_size": vocab,
        "quantization": quantisation,
        "quantization_config": quantisation,
    }
