"""Reads EAGLE-3 heads as they are published: SafeAI's and SpecForge's layout, and speculators'.

What the formats count differently is made one here: layers are the target's outputs from 0 on, tokens its own. Every
reason why a head can't be used is one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from outrider.drafting.heads.checkpoint import Weights, fill, read_config, read_weights, refuse_quantised
from outrider.drafting.heads.eagle3 import Eagle3, Eagle3Config
from outrider.engine import positions
from outrider.protocol.errors import CannotDraft
from outrider.protocol.heads import head_kind


def read(folder: Path, target: Mapping[str, Any], vocab_size: int, embed: Callable[[mx.array], mx.array]) -> Eagle3:
    """The head in `folder` for a target with this config, so many tokens and this embedding.

    Raises:
        CannotDraft: it is no head of this kind, not whole, or one for another target.
    """
    config, weights = read_config(folder), read_weights(folder)
    return build(config, weights, target, vocab_size, embed, str(folder))


def build(
    config: Mapping[str, Any],
    weights: Weights,
    target: Mapping[str, Any],
    vocab_size: int,
    embed: Callable[[mx.array], mx.array],
    name: str = "the head",
) -> Eagle3:
    """The same from what was read. Raises CannotDraft."""
    if head_kind(config) != "eagle3":
        raise CannotDraft(f"{name} is no EAGLE-3 head by its config.json; expected its architectures to say Eagle3")
    refuse_quantised(config, weights, name)
    weights = {_renamed(key): value for key, value in weights.items()}
    d2t, _ = weights.pop("d2t", None), weights.pop("t2d", None)
    target = target.get("text_config") or target
    settings = _settings(config, weights, target, vocab_size, name)
    ids = _target_ids(d2t, settings, vocab_size, name)
    _check_size(settings, target, name)
    head = Eagle3(settings, embed, ids)
    fill(head, weights, name)
    positions.install(head)
    return head


def _renamed(key: str) -> str:
    key = key.removeprefix("model.")
    return "layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key


def _settings(
    config: Mapping[str, Any], weights: Weights, target: Mapping[str, Any], vocab_size: int, name: str
) -> Eagle3Config:
    """Sizes by the config, switches by the config or by the weights that are there."""
    layer = config.get("transformer_layer_config") or config
    try:
        hidden, heads = int(layer["hidden_size"]), int(layer["num_attention_heads"])
        layers = len({key.split(".")[1] for key in weights if key.startswith("layers.")})
        rope = layer.get("rope_parameters") or {}
        return Eagle3Config(
            hidden_size=hidden,
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            vocab_size=vocab_size,
            draft_vocab_size=int(config.get("draft_vocab_size") or layer["vocab_size"]),
            intermediate_size=int(layer["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
            head_dim=int(layer.get("head_dim") or hidden // heads),
            taps=_taps(config, int(target["num_hidden_layers"]), name),
            num_hidden_layers=max(layers, 1),
            rms_norm_eps=float(layer.get("rms_norm_eps", 1e-6)),
            rope_theta=float(layer.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            rope_scaling=layer.get("rope_scaling") or _scaling(rope),
            # Positions count from where it begins to read, and the target has its own end.
            context_length=int(target.get("max_position_embeddings") or layer.get("max_position_embeddings") or 32768),
            embeds="embed_tokens.weight" in weights,
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            norm_output=bool(config.get("norm_output", False)),
            fc_norm="fc_norm.0.weight" in weights,
            input_norm="input_norm.weight" in weights,
            qk_norm="layers.0.self_attn.q_norm.weight" in weights,
            attention_bias="layers.0.self_attn.q_proj.bias" in weights,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CannotDraft(f"{name}: config.json lacks {error}; expected a head's sizes") from error


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """transformers 5 writes the rope's scaling beside its base."""
    return dict(rope) if rope.get("rope_type", "default") != "default" else None


def _taps(config: Mapping[str, Any], layers: int, name: str) -> tuple[int, ...]:
    """Layers' outputs, counted from 0.

    SpecForge's `eagle_config` counts so, too. A list at the top, speculators', counts inputs: its j is the output of
    j - 1. Who names none means the official three.
    """
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    listed = config.get("eagle_aux_hidden_state_layer_ids")
    if nested:
        taps = tuple(int(number) for number in nested)
    elif listed:
        taps = tuple(int(number) - 1 for number in listed)
    else:
        taps = (1, layers // 2 - 1, layers - 4)
    if not all(0 <= number < layers for number in taps):
        raise CannotDraft(f"{name} reads the target's layers {taps}, and this one has {layers}; expected its own head")
    return taps


def _target_ids(d2t: mx.array | None, settings: Eagle3Config, vocab_size: int, name: str) -> mx.array | None:
    """The target's name of each of the head's tokens: its own number plus `d2t`."""
    count = settings.draft_vocab_size
    if d2t is None:
        if count > vocab_size:
            raise CannotDraft(f"{name} has {count} tokens and this target {vocab_size}; expected its own head")
        return None if count == vocab_size else mx.arange(count)
    if d2t.shape != (count,):
        raise CannotDraft(f"{name} maps {d2t.shape} tokens and its config says {count}; fetch the head again")
    ids = mx.arange(count) + d2t.astype(mx.int32)
    known = cast("list[int]", ids.tolist())
    if min(known) < 0 or max(known) >= vocab_size:
        raise CannotDraft(f"{name} knows tokens beyond this target's {vocab_size}; expected a head for its vocabulary")
    return ids


def _check_size(settings: Eagle3Config, target: Mapping[str, Any], name: str) -> None:
    size = int(target["hidden_size"])
    if settings.target_hidden_size != size:
        raise CannotDraft(
            f"{name} reads rows of {settings.target_hidden_size} numbers and this target's have {size}; expected a head"
            " for this target"
        )
    if not settings.embeds and settings.hidden_size != size:
        raise CannotDraft(f"{name} has no embedding and is narrower than the target; expected embed_tokens in it")
