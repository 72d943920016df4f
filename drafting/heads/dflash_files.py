"""Reads block heads as they are published: z-lab's DFlash and DFlash2, DeepSpec's and SpecForge's DSpark, speculators'.

What the formats count differently is made one here: layers are the target's outputs from 0 on, tokens its own, and a
block's depth is what it drafts. Every reason why a head can't be used is one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

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
from outrider.drafting.heads.dflash import DFlash, DFlashConfig
from outrider.drafting.heads.vocabulary import DraftVocabulary
from outrider.engine import positions
from outrider.engine.loading import LoadedModel
from outrider.engine.parts import backbone_of, embedding, output_layer
from outrider.protocol.errors import CannotDraft
from outrider.protocol.heads import head_kind

_Layer = Callable[[mx.array], mx.array]
_FAMILIES = ("qwen3", "llama", "dflash", "dspark", "")
_TARGETS = ("embed_tokens.", "lm_head.", "verifier_norm.", "verifier_lm_head.", "rotary_emb.", "t2d")
_BLOCK = 16
_VISIBLE = ("variable_prefix", "vp_drafter")  # NeMo's and SpecForge's names of D2SD's way to train


def read(folder: Path, target: LoadedModel) -> DFlash:
    """The head in `folder` for its target.

    Raises:
        CannotDraft: it is no head of this kind, not whole, or one for another target.
    """
    backbone, _ = backbone_of(target.model)
    inner = getattr(target.model, "language_model", target.model)
    table, output = embedding(backbone), output_layer(inner, backbone)
    return build(
        read_config(folder), read_weights(folder), target.config, target.vocab_size,
        lambda tokens: table(tokens), output, str(folder),
    )  # fmt: skip


def build(
    config: Mapping[str, Any],
    weights: Weights,
    target: Mapping[str, Any],
    vocab_size: int,
    embed: _Layer,
    output: _Layer,
    name: str = "the head",
) -> DFlash:
    """The same from what was read. Raises CannotDraft."""
    if head_kind(config) != "dflash":
        raise CannotDraft(f"{name} is not a DFlash head: its config.json has another architecture")
    refuse_quantised(config, weights, name)
    weights = {_renamed(key): value for key, value in weights.items()}
    target = target.get("text_config") or target
    with complete(name):
        settings = _settings(_flat(config), weights, target, name)
        count = int(config.get("draft_vocab_size") or vocab_size)
    _check_target(_flat(config), settings, target, vocab_size, name)
    d2t = weights.pop("d2t", None)
    vocabulary = DraftVocabulary.read(d2t, count if d2t is not None else vocab_size, vocab_size, name)
    if d2t is None:
        weights = {key: value for key, value in weights.items() if not key.startswith("lm_head.")}
    head = DFlash(settings, embed, output, vocabulary)
    unknown = sorted(set(weights) - {key for key, _ in tree_flatten(head.parameters())})
    unknown = [key for key in unknown if not key.startswith(_TARGETS)]
    if unknown:
        raise CannotDraft(f"{name} has {', '.join(unknown[:3])}, which is not supported")
    fill(head, weights, name)
    positions.install(head)
    return head


def _renamed(key: str) -> str:
    return key.removeprefix("model.").removeprefix("logit_head.")


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """All settings side by side: formats nest the sizes, or what is the method's own."""
    return {**config, **(config.get("transformer_layer_config") or {}), **(config.get("dflash_config") or {})}


def _settings(config: Mapping[str, Any], weights: Weights, target: Mapping[str, Any], name: str) -> DFlashConfig:
    """Sizes by the config, switches by the config or by the weights that are there."""
    block, from_anchor = int(config.get("block_size") or _BLOCK), _from_anchor(config)
    markov = int(config.get("markov_rank") or 0)
    kind = str(config.get("markov_head_type") or "vanilla").lower()
    if markov and kind not in ("vanilla", "gated", "rnn"):
        raise CannotDraft(f"{name} links its tokens by {kind!r}, which is not supported")
    return DFlashConfig(
        **sizes_of(config, weights, target),
        taps=_taps(config, int(target["num_hidden_layers"]), name),
        windows=_windows(config, name),
        mask_token=int(config["mask_token_id"]),
        depth=block if from_anchor else block - 1,
        from_anchor=from_anchor,
        sees_prefixes=config.get("loss_type") in _VISIBLE,
        own_output="d2t" in weights,
        multiplier=float(config.get("output_multiplier") or 1.0),
        softcap=float(config.get("final_logit_softcapping") or 0.0),
        markov=kind,
        markov_rank=markov,
        confidence="confidence_head.proj.weight" in weights,
        confidence_with_markov=bool(config.get("confidence_head_with_markov", False)),
        conv_taps=int(config.get("conv_kernel_size") or 0),
        conv_group=int(config.get("conv_group_size") or 16),
        selector_rank=int(config.get("selector_rank") or 0),
    )


def _from_anchor(config: Mapping[str, Any]) -> bool:
    """DSpark's blocks draft from their first row on, DFlash's from the second, unless they say otherwise."""
    said = config.get("sample_from_anchor", config.get("shift_label"))
    return bool(said) if said is not None else _is_dspark(config)


def _is_dspark(config: Mapping[str, Any]) -> bool:
    named = [config.get("projector_type"), config.get("speculators_model_type"), *(config.get("architectures") or ())]
    return any("dspark" in str(name).lower() for name in named)


def _taps(config: Mapping[str, Any], layers: int, name: str) -> tuple[int, ...]:
    """Layers' outputs, counted from 0, as z-lab and DeepSpec do; speculators' j is the output of j - 1."""
    inputs = config.get("aux_hidden_state_layer_ids")
    if inputs:
        taps = tuple(int(number) - 1 for number in inputs)
    elif config.get("target_layer_ids"):
        taps = tuple(int(number) for number in config["target_layer_ids"])
    else:
        taps = _usual_taps(layers, int(config["num_hidden_layers"]))
    check_taps(taps, layers, name)
    return taps


def _usual_taps(layers: int, own: int) -> tuple[int, ...]:
    """As many as the head has layers, evenly from the second to the last but two."""
    if own == 1:
        return (layers // 2,)
    return tuple(round(1 + number * (layers - 4) / (own - 1)) for number in range(own))


def _windows(config: Mapping[str, Any], name: str) -> tuple[int | None, ...]:
    count = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or ["full_attention"] * count
    window = int(config.get("sliding_window") or 0)
    windows = tuple((window or None) if kind == "sliding_attention" else None for kind in kinds[:count])
    if any(windows) and config.get("sliding_window_non_causal") is False:
        raise CannotDraft(f"{name} has sliding windows of causal blocks, which are not supported")
    return windows


def _check_target(
    config: Mapping[str, Any], settings: DFlashConfig, target: Mapping[str, Any], vocab_size: int, name: str
) -> None:
    layers = int(target["num_hidden_layers"])
    if config.get("model_type", "") not in _FAMILIES:
        raise CannotDraft(f"{name} is built of {config['model_type']} layers; expected those of qwen3 or llama")
    check_width(settings.hidden_size, target, name)
    if int(config.get("num_target_layers") or layers) != layers:
        raise CannotDraft(
            f"{name} was trained for a target of {config['num_target_layers']} layers, but this one has {layers};"
            " expected a head for this target"
        )
    if not 0 <= settings.mask_token < vocab_size:
        raise CannotDraft(
            f"{name} has mask token {settings.mask_token}, but this target has {vocab_size} tokens; expected a head for"
            " this target"
        )
    if settings.depth < 1:
        raise CannotDraft(f"{name} has blocks of {config.get('block_size')} tokens; expected at least 2")
