"""What the families whose models have a head of their own do differently: where its tensors are, which row it reads.

A family's layer is mlx-lm's, and so is what makes a repository's tensors into it, where mlx-lm has that. Knows names of
tensors; nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, llama, mimo, qwen3_5, qwen3_next

from outrider.drafting.heads.checkpoint import Weights
from outrider.drafting.heads.mtp import MtpForm
from outrider.engine.loading import LoadedModel
from outrider.protocol.errors import CannotDraft

_LAYER = "layers.0."
_THEIR_LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True)
class Family:
    """`prefix`: of the head's tensors. `named`: these by our names. `block`: its layer, of which the head holds one.

    `exact`: tensors that stay float32.
    """

    form: MtpForm
    prefix: str
    named: Callable[[Weights], Weights]
    block: nn.Module
    exact: frozenset[str] = frozenset()


def family_of(target: LoadedModel) -> Family:
    """Raises CannotDraft: heads of such models are not known here."""
    model = target.model
    args: Any = getattr(model, "language_model", model).args
    match model:
        case qwen3_5.Model():
            return _qwen(qwen3_5.DecoderLayer(args, args.full_attention_interval - 1))
        case qwen3_next.Model():
            return _qwen(qwen3_next.Qwen3NextDecoderLayer(args, args.full_attention_interval - 1))
        case mimo.Model():
            return _mimo(mimo.TransformerBlock(args))
        case llama.Model():  # none is published with one; `models/train.py` makes them in MiMo's layout
            return _mimo(llama.TransformerBlock(args))
        case deepseek_v3.Model():
            block = deepseek_v3.DeepseekV3DecoderLayer(args, args.num_hidden_layers)
            return _next_layer(target, args, block, together=False)
        case glm4_moe_lite.Model():
            block = glm4_moe_lite.Glm4MoeLiteDecoderLayer(args, args.num_hidden_layers)
            return _next_layer(target, args, block, together=False)
        case glm4_moe.Model():
            return _next_layer(target, args, glm4_moe.DecoderLayer(args, args.num_hidden_layers), together=True)
    raise CannotDraft(
        f"MTP heads of {target.model_type} models are not supported; expected qwen3_5, qwen3_next,"
        " deepseek_v3, glm4_moe,"
        " glm4_moe_lite, llama or mimo"
    )


def _qwen(block: nn.Module) -> Family:
    """Norms are stored as what is above 1, experts one by one or all in one tensor."""

    def named(weights: Weights) -> Weights:
        names = {"pre_fc_norm_embedding.": "norm_embedding.", "pre_fc_norm_hidden.": "norm_hidden."}
        ours = _renamed(weights, names)
        lifted = {key: value + (value.ndim == 1 and "norm" in key) for key, value in ours.items()}
        return _joined_experts(_parted_experts(lifted))

    return Family(MtpForm(after_norm=True, embedding_first=True), "mtp.", named, block)


def _mimo(block: nn.Module) -> Family:
    names = {
        "token_layernorm.": "norm_embedding.",
        "hidden_layernorm.": "norm_hidden.",
        "input_proj.": "fc.",
        "final_layernorm.": "norm.",
        "": _LAYER,
    }
    form = MtpForm(after_norm=True, embedding_first=False)
    return Family(form, "model.mtp_layers.0.", lambda weights: _renamed(weights, names), block)


def _next_layer(target: LoadedModel, args: Any, block: nn.Module, together: bool) -> Family:
    """DeepSeek's and GLM's: the layer behind the last one. mlx-lm knows what its tensors become, by a layer's name."""
    names = {
        "enorm.": "norm_embedding.",
        "hnorm.": "norm_hidden.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": "lm_head.",
        "embed_tokens.": "embed_tokens.",
        "": _THEIR_LAYER,
    }

    def named(weights: Weights) -> Weights:
        return _renamed(target.model.sanitize(_renamed(weights, names)), {_THEIR_LAYER: _LAYER})

    form = MtpForm(after_norm=False, embedding_first=True, together=together)
    exact = frozenset({f"{_LAYER}mlp.gate.e_score_correction_bias"})
    return Family(form, f"model.layers.{args.num_hidden_layers}.", named, block, exact)


def _renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    def name(key: str) -> str:
        for theirs, ours in names.items():
            if key.startswith(theirs):
                return ours + key.removeprefix(theirs)
        return key

    return {name(key): value for key, value in weights.items()}


def _parted_experts(weights: Weights) -> Weights:
    """Of all experts in one tensor (Qwen3.5) the gates are the first half."""
    at = f"{_LAYER}mlp."
    if f"{at}experts.gate_up_proj" not in weights:
        return weights
    others = {key: value for key, value in weights.items() if not key.startswith(f"{at}experts.")}
    gate, up = mx.split(weights[f"{at}experts.gate_up_proj"], 2, axis=-2)
    parts = {"gate": gate, "up": up, "down": weights[f"{at}experts.down_proj"]}
    return others | {f"{at}switch_mlp.{name}_proj.weight": value for name, value in parts.items()}


def _joined_experts(weights: Weights) -> Weights:
    """Of experts one by one (Qwen3-Next)."""
    at = f"{_LAYER}mlp."
    count = sum(key.startswith(f"{at}experts.") and key.endswith(".up_proj.weight") for key in weights)
    if not count:
        return weights
    others = {key: value for key, value in weights.items() if not key.startswith(f"{at}experts.")}
    for name in ("gate", "up", "down"):
        each = [weights[f"{at}experts.{number}.{name}_proj.weight"] for number in range(count)]
        others[f"{at}switch_mlp.{name}_proj.weight"] = mx.stack(each)
    return others
