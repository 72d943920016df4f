"""Heads for multi-token prediction that come with a target: one layer like its own over a row and the next token.

The row is the target's after its final norm, and then the head's own after its norm. The embedding and the output layer
are the target's. Both are as in vLLM and SGLang. A family's layer is mlx-lm's, and so is the conversion of a
repository's tensors if mlx-lm has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite, llama, mimo, qwen3_5, qwen3_next

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget, Weights, read_weights, rename_tensors
from outrider.drafters.heads.head import LayersHead
from outrider.engine.flat import FlatCache
from outrider.engine.hidden_states import AFTER_NORM
from outrider.engine.loading import LoadedModel
from outrider.protocol.errors import CannotDraft

if TYPE_CHECKING:
    from outrider.engine.ort.graph import Builder

_LAYER_PREFIX = "layers.0."
_MLX_LM_LAYER_PREFIX = "model.layers.0."


class Mtp(LayersHead):
    """`block` is a layer of the target's kind, whose latent attention, if it has one, computes one text at a time. The
    input of `fc` is the token's embedding, then the row."""

    points = (AFTER_NORM,)

    def __init__(self, size: int, eps: float, block: nn.Module, target: HeadTarget) -> None:
        super().__init__(target)
        self.together, self._windows = "kv_a_proj_with_mqa" not in block.self_attn, (None,)
        self.norm_embedding = nn.RMSNorm(size, eps=eps)
        self.norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [block]
        self.norm = nn.RMSNorm(size, eps=eps)

    def fuse(self, rows: mx.array) -> mx.array:
        return rows.astype(self.fc.weight.dtype)

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        embedded = self.norm_embedding(self._embed(tokens).astype(features.dtype))
        x = self.fc(mx.concatenate([embedded, self.norm_hidden(features)], axis=-1))
        mask = caches[0].make_mask(tokens.shape[1], return_array=not self.together)
        out: mx.array = self.layers[0](x, mask, caches[0])
        return out

    def build_input(self, b: Builder) -> tuple[str, str]:
        both = b.op("Concat", b.norm("x", self.norm_embedding), b.norm("features", self.norm_hidden), axis=-1)
        x = b.linear(both, [self.fc])
        return x, b.norm(x, self.layers[0].input_layernorm)


@dataclass(frozen=True, slots=True)
class MtpFamily:
    """A family of heads: the `prefix` of their tensors, a function that gives these our names (`rename`), and the
    head's layer (`block`)."""

    prefix: str
    rename: Callable[[Weights], Weights]
    block: nn.Module


def select_family(target: LoadedModel) -> MtpFamily:
    """Returns the family of a target's heads. Raises CannotDraft if it is not supported."""
    model = target.model
    args: Any = getattr(model, "language_model", model).args
    match model:
        case qwen3_5.Model():
            return _make_qwen_family(qwen3_5.DecoderLayer(args, args.full_attention_interval - 1))
        case qwen3_next.Model():
            return _make_qwen_family(qwen3_next.Qwen3NextDecoderLayer(args, args.full_attention_interval - 1))
        case mimo.Model():
            return _make_mimo_family(mimo.TransformerBlock(args))
        case llama.Model():  # none is published; `models/train.py` trains them in MiMo's layout
            return _make_mimo_family(llama.TransformerBlock(args))
        case deepseek_v3.Model():
            return _make_next_layer_family(target, args, deepseek_v3.DeepseekV3DecoderLayer)
        case glm4_moe_lite.Model():
            return _make_next_layer_family(target, args, glm4_moe_lite.Glm4MoeLiteDecoderLayer)
        case glm4_moe.Model():
            return _make_next_layer_family(target, args, glm4_moe.DecoderLayer)
    raise CannotDraft(
        f"MTP heads of {target.model_type} models are not supported; expected qwen3_5, qwen3_next, deepseek_v3,"
        " glm4_moe, glm4_moe_lite, llama or mimo"
    )


def _make_qwen_family(block: nn.Module) -> MtpFamily:
    """Returns Qwen's family: norms are stored as differences from 1, experts one by one or all in one tensor.

    Conversions to MLX may have the norms themselves; those of the layer tell, since the others may be small.
    """

    def rename(weights: Weights) -> Weights:
        names = {"pre_fc_norm_embedding.": "norm_embedding.", "pre_fc_norm_hidden.": "norm_hidden."}
        ours = rename_tensors(weights, names)
        shift = int(bool(ours[f"{_LAYER_PREFIX}input_layernorm.weight"].mean() < 0.5))
        return _stack_experts({k: v + shift * (v.ndim == 1 and "norm" in k) for k, v in ours.items()})

    return MtpFamily("mtp.", rename, block)


def _make_mimo_family(block: nn.Module) -> MtpFamily:
    """Returns MiMo's family, in which the row comes before the embedding."""
    names = {
        "token_layernorm.": "norm_embedding.",
        "hidden_layernorm.": "norm_hidden.",
        "input_proj.": "fc.",
        "final_layernorm.": "norm.",
        "": _LAYER_PREFIX,
    }

    def rename(weights: Weights) -> Weights:
        ours = rename_tensors(weights, names)
        row, embedding = mx.split(ours["fc.weight"], 2, axis=-1)
        return {**ours, "fc.weight": mx.concatenate([embedding, row], axis=-1)}

    return MtpFamily("model.mtp_layers.0.", rename, block)


def _make_next_layer_family(target: LoadedModel, args: Any, layer: type[nn.Module]) -> MtpFamily:
    """Returns DeepSeek's and GLM's family: the layer after the last one, whose tensors mlx-lm converts by name. Its
    copies of the target's embedding and output layer are not used."""
    names = {
        "enorm.": "norm_embedding.",
        "hnorm.": "norm_hidden.",
        "eh_proj.": "fc.",
        "shared_head.norm.": "norm.",
        "shared_head.head.": "lm_head.",
        "embed_tokens.": "embed_tokens.",
        "": _MLX_LM_LAYER_PREFIX,
    }

    def rename(weights: Weights) -> Weights:
        converted = target.model.sanitize(rename_tensors(weights, names))
        return rename_tensors(converted, {_MLX_LM_LAYER_PREFIX: _LAYER_PREFIX})

    number = args.num_hidden_layers
    return MtpFamily(f"model.layers.{number}.", rename, layer(args, number))


def _stack_experts(weights: Weights) -> Weights:
    """Returns the experts in mlx-lm's form, from one tensor of all, whose first half are the gates (Qwen3.5), or from
    a tensor for each (Qwen3-Next).
    """
    at = f"{_LAYER_PREFIX}mlp.experts."
    experts = {key.removeprefix(at): value for key, value in weights.items() if key.startswith(at)}
    if not experts:
        return weights
    if "gate_up_proj" in experts:
        gate, up = mx.split(experts["gate_up_proj"], 2, axis=-2)
        parts = {"gate": gate, "up": up, "down": experts["down_proj"]}
    else:
        numbers = range(sum(key.endswith(".up_proj.weight") for key in experts))
        names = ("gate", "up", "down")
        parts = {name: mx.stack([experts[f"{n}.{name}_proj.weight"] for n in numbers]) for name in names}
    others = {key: value for key, value in weights.items() if not key.startswith(at)}
    return others | {f"{_LAYER_PREFIX}mlp.switch_mlp.{name}_proj.weight": value for name, value in parts.items()}


def read_head(folder: Path, target: LoadedModel) -> Mtp:
    """Returns the head for its target, which mlx-lm leaves out, in a `folder` with the original repository or its
    tensors.

    Raises:
        CannotDraft: there is none, it is not complete, or the target's family is not supported.
    """
    family, own = select_family(target), HeadTarget.of(target)
    published = HeadCheckpoint({}, read_weights(folder, family.prefix), own, str(folder))
    published.check_not_quantized()
    try:
        weights = family.rename(published.weights)
    except (KeyError, ValueError, IndexError) as error:
        raise CannotDraft(f"{folder} lacks {error} of the head's tensors; use the original repository") from error
    args: Any = getattr(target.model, "language_model", target.model).args
    head = Mtp(args.hidden_size, args.rms_norm_eps, family.block, own)
    may_cast = getattr(target.model, "cast_predicate", lambda key: True)
    replace(published, weights=weights).load_into(head, [key for key in weights if not may_cast(key)])
    return head
