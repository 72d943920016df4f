"""ReDrafter (Cheng et al. 2024, arXiv 2403.09919): a recurrent state over drafted tokens, with one row of the target.

It reads only the newest pair of a text and keeps none, so its whole input is the feature: the target's row, which stays
the same for a chain, and the state, which each token advances. Weights and fields of the config have the names of
Apple's checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget
from outrider.drafters.heads.head import PairHead
from outrider.drafters.heads.layers import DraftVocabulary
from outrider.engine.flat import FlatCache
from outrider.engine.hidden_states import AFTER_NORM


@dataclass(frozen=True, slots=True)
class RedrafterConfig:
    """`rnn`: the state is a learned function of the one before and the token's embedding; else their sum."""

    hidden_size: int
    vocab_size: int
    exit_dim: int
    num_draft_layers: int
    rnn: bool = False


class ResBlock(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def __call__(self, x: mx.array) -> mx.array:
        out: mx.array = x + nn.silu(self.linear(x))
        return out


class Redrafter(PairHead):
    points, reach = (AFTER_NORM,), 1
    layers: tuple[nn.Module, ...] = ()  # there are no keys and values

    def __init__(self, config: RedrafterConfig, target: HeadTarget, vocabulary: DraftVocabulary) -> None:
        super().__init__(target, vocabulary)
        size, width = config.hidden_size, config.exit_dim
        self._rnn = config.rnn
        if width != 2 * size:
            self.input_proj = nn.Linear(2 * size, width)
        blocks: list[Any] = [ResBlock(width) for _ in range(config.num_draft_layers)]
        self.lm_head = [*blocks, nn.Linear(width, config.vocab_size, bias=False)]
        if config.rnn:
            self.rnn_u = nn.Linear(size, size)
            self.rnn_w = nn.Linear(size, size, bias=False)

    def fuse(self, rows: mx.array) -> mx.array:
        rows = rows.astype(self.lm_head[-1].weight.dtype)
        return mx.concatenate([rows, mx.zeros_like(rows)], axis=-1)

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        row, state = mx.split(features, 2, axis=-1)
        embedded = self._embed(tokens).astype(features.dtype)
        state = nn.silu(self.rnn_w(embedded) + self.rnn_u(state)) if self._rnn else embedded + state
        return mx.concatenate([row, state], axis=-1)

    def logits(self, hidden: mx.array) -> mx.array:
        x = self.input_proj(hidden) if "input_proj" in self else hidden
        for layer in self.lm_head:
            x = layer(x)
        return self.vocabulary.spread(x.astype(mx.float32))


def build(checkpoint: HeadCheckpoint) -> Redrafter:
    """Returns the head of a checkpoint in the format of Apple's trainers.

    Raises:
        CannotDraft: it is not a head of this kind, not complete, or for another target.
    """
    with checkpoint.config_errors("redrafter"):
        settings = msgspec.convert(checkpoint.config, RedrafterConfig, strict=False)
        checkpoint.check_target(hidden_size=settings.hidden_size)
        head = Redrafter(settings, checkpoint.target, checkpoint.vocabulary(settings.vocab_size))
        checkpoint.load_into(head)
        return head
