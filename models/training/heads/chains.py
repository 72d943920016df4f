"""Heads that draft token by token, trained as they are used (EAGLE-3's training-time test, arXiv 2503.01840).

The head's own outputs replace the target's hidden states that are not known yet, for as many steps as it learns to
draft.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.heads.head import TrainableHead, flat_positions
from models.training.heads.loss import Predictions
from models.training.heads.store import Batch
from models.training.llama import apply_rope, rope_tables
from models.training.recipe import Shape

_STRIDE = 3  # chains are continued after one position in three


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Keys and values [N, kv_heads, K, head_dim] so far: those of the target's hidden states, then of each step."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class StepPositions:
    """Cosines and sines of a step's positions, and which keys each of them sees (None: causal)."""

    rope: tuple[Tensor, Tensor]
    mask: Tensor | None


class ChainAttention(nn.Module):
    """Attention over inputs of `width`. A position sees the target's hidden states up to its own, and the later ones of
    its own chain."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, at: StepPositions, past: KeysValues | None) -> tuple[Tensor, KeysValues]:
        batch, count, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, count, -1, self._head_dim).transpose(1, 2)

        queries, keys, values = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        queries, keys = apply_rope(queries, *at.rope), apply_rope(keys, *at.rope)
        if past is not None:
            keys, values = torch.cat((past.keys, keys), dim=2), torch.cat((past.values, values), dim=2)
        mixed = functional.scaled_dot_product_attention(
            queries, keys, values, at.mask, is_causal=at.mask is None, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, count, -1))
        return out, KeysValues(keys, values)


class ChainHead(TrainableHead):
    """A head of `shape` that learns chains of `steps` tokens. Each step weighs `decay` times the previous one in the
    loss."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, steps: int, decay: float) -> None:
        super().__init__()
        self._steps, self._decay = steps, decay
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @abstractmethod
    def features(self, batch: Batch, count: int) -> Tensor:
        """Returns the features [N, count, W] of the first `count` positions of the windows."""

    @abstractmethod
    def step(
        self, features: Tensor, tokens: Tensor, at: StepPositions, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues | None]:
        """Returns outputs [N, R, H] for features and the tokens [N, R] after them, and the extended keys and values."""

    @abstractmethod
    def output_input(self, x: Tensor) -> Tensor:
        """Returns the input of the output layer for these outputs."""

    @abstractmethod
    def next_features(self, x: Tensor) -> Tensor:
        """Returns the features of the next step for these outputs."""

    def forward(self, batch: Batch) -> list[Predictions]:
        """Drafts a chain after each position p: step i reads token p + i + 1 and predicts token p + i + 2."""
        count = batch.tokens.shape[1] - self._steps
        positions = torch.arange(count, device=batch.tokens.device)
        at = StepPositions((self.cos[positions], self.sin[positions]), None)
        features, past, steps = self.features(batch, count), None, []
        for step in range(self._steps):
            if step == 1:
                positions = self._continued(batch, positions)
                features = features[:, positions]
            if step:
                rope = self.cos[positions + step], self.sin[positions + step]
                at = StepPositions(rope, _chain_mask(positions, count, step))
            x, past = self.step(features, batch.tokens[:, positions + step + 1], at, past)
            predicted = flat_positions(batch, positions + step + 1)
            steps.append(Predictions(self.output_input(x).flatten(0, 1), predicted, self._decay**step))
            features = self.next_features(x)
        return steps

    def _continued(self, batch: Batch, positions: Tensor) -> Tensor:
        """Returns the positions whose chains are continued; in training not all, because neighbours are similar."""
        return positions[int(batch.tokens.sum()) % _STRIDE :: _STRIDE] if self.training else positions


def _chain_mask(positions: Tensor, count: int, steps: int) -> Tensor:
    """Returns a mask [R, count + steps * R]: a position sees the target's hidden states up to its own, and its own
    output of each step."""
    causal = torch.arange(count, device=positions.device) <= positions[:, None]
    own = torch.eye(len(positions), dtype=torch.bool, device=positions.device)
    return torch.cat((causal, *[own] * steps), dim=1)
