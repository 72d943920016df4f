"""Reads EAGLE-3 and P-EAGLE heads as they are published: SafeAI's and SpecForge's layout, and speculators'.

What the formats count differently is made one here: layers are the target's outputs from 0 on, tokens its own. Every
reason why a head can't be used is one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.drafting.heads.checkpoint import (
    Weights,
    check_taps,
    check_width,
    complete,
    fill,
    read_config,
    read_weights,
    refuse_quantised,
    sizes_of,
)
from outrider.drafting.heads.eagle3 import Eagle3, Eagle3Config, PEagle
from outrider.drafting.heads.vocabulary import DraftVocabulary
from outrider.engine import positions
from outrider.protocol.errors import CannotDraft
from outrider.protocol.heads import head_kind

_DEPTHS = 8  # what the published recipes train


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
        raise CannotDraft(f"{name} is not an EAGLE-3 head: its config.json has another architecture")
    refuse_quantised(config, weights, name)
    weights = {_renamed(key): value for key, value in weights.items()}
    d2t, _ = weights.pop("d2t", None), weights.pop("t2d", None)
    target = target.get("text_config") or target
    settings, count = _settings(config, weights, target, name)
    vocabulary = DraftVocabulary.read(d2t, count, vocab_size, name)
    _check_size(settings, target, name)
    if "mask_hidden" in weights:
        head: Eagle3 = PEagle(settings, embed, vocabulary, *_masks(config, vocab_size, name))
    else:
        head = Eagle3(settings, embed, vocabulary)
    fill(head, weights, name)
    positions.install(head)
    return head


def _renamed(key: str) -> str:
    key = key.removeprefix("model.")
    return "layers.0." + key.removeprefix("midlayer.") if key.startswith("midlayer.") else key


def _settings(
    config: Mapping[str, Any], weights: Weights, target: Mapping[str, Any], name: str
) -> tuple[Eagle3Config, int]:
    """Sizes by the config, switches by the config or by the weights that are there; and how many tokens it has."""
    layer = config.get("transformer_layer_config") or config
    with complete(name):
        sizes = sizes_of(layer, weights, target)
        layers = len({key.split(".")[1] for key in weights if key.startswith("layers.")})
        settings = Eagle3Config(
            **sizes,
            target_hidden_size=int(config.get("target_hidden_size") or sizes["hidden_size"]),
            taps=_taps(config, int(target["num_hidden_layers"]), name),
            num_hidden_layers=max(layers, 1),
            embeds="embed_tokens.weight" in weights,
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            norm_output=bool(config.get("norm_output", False)),
            fc_norm="fc_norm.0.weight" in weights,
            input_norm="input_norm.weight" in weights,
        )
        return settings, int(config.get("draft_vocab_size") or layer["vocab_size"])


def _masks(config: Mapping[str, Any], vocab_size: int, name: str) -> tuple[int, int]:
    """P-EAGLE's mask token, and how many tokens it drafts at once."""
    token = config.get("mask_token_id", (config.get("eagle_config") or {}).get("mask_token_id"))
    if token is None or not 0 <= int(token) < vocab_size:
        raise CannotDraft(
            f"{name} has mask token {token}, but this target has {vocab_size} tokens; check mask_token_id"
        )
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(token), int(methods[0].get("speculative_tokens") or config.get("num_depths") or _DEPTHS)


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
    check_taps(taps, layers, name)
    return taps


def _check_size(settings: Eagle3Config, target: Mapping[str, Any], name: str) -> None:
    check_width(settings.target_hidden_size, target, name)
    if not settings.embeds and settings.hidden_size != settings.target_hidden_size:
        raise CannotDraft(f"{name} has no embedding and is narrower than the target; expected embed_tokens in it")
