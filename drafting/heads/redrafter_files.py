"""Reads ReDrafters as Apple's trainers write them. Every reason why one can't be used is one sentence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from outrider.drafting.heads.checkpoint import Weights, complete, fill, read_config, read_weights, refuse_quantised
from outrider.drafting.heads.redrafter import Redrafter, RedrafterConfig
from outrider.engine.loading import LoadedModel
from outrider.engine.parts import backbone_of, embedding
from outrider.protocol.errors import CannotDraft
from outrider.protocol.heads import head_kind


def read(folder: Path, target: LoadedModel) -> Redrafter:
    """The head in `folder` for this target.

    Raises:
        CannotDraft: it is no head of this kind, not whole, or one for another target.
    """
    table = embedding(backbone_of(target.model)[0])
    config, weights = read_config(folder), read_weights(folder)
    return build(config, weights, target, lambda tokens: table(tokens), str(folder))


def build(
    config: Mapping[str, Any],
    weights: Weights,
    target: LoadedModel,
    embed: Callable[[mx.array], mx.array],
    name: str = "the head",
) -> Redrafter:
    """The same from what was read. Raises CannotDraft."""
    if head_kind(config) != "redrafter":
        raise CannotDraft(
            f"{name} is not a ReDrafter: its config.json does not say model_type recurrent_drafting_drafter"
        )
    refuse_quantised(config, weights, name)
    settings = _settings(config, name)
    size = int(embed(mx.array([0])).shape[-1])
    if settings.hidden_size != size:
        raise CannotDraft(
            f"{name} expects a hidden size of {settings.hidden_size}, but this target has {size}; expected a head for"
            " this target"
        )
    if settings.vocab_size > target.vocab_size:
        raise CannotDraft(
            f"{name} has {settings.vocab_size} tokens and this target {target.vocab_size}; expected a"
            " head for this target"
        )
    head = Redrafter(settings, embed, target.vocab_size, target.context_length)
    fill(head, weights, name)  # emb_norm.weight, too, is in some checkpoints: their own forward leaves it out
    return head


def _settings(config: Mapping[str, Any], name: str) -> RedrafterConfig:
    with complete(name):
        return RedrafterConfig(
            hidden_size=int(config["hidden_size"]),
            vocab_size=int(config["vocab_size"]),
            exit_dim=int(config["exit_dim"]),
            num_draft_layers=int(config["num_draft_layers"]),
            rnn=bool(config.get("rnn", False)),
        )
