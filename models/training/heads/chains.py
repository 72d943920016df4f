"""Learners of heads that draft token by token, trained as they are used (EAGLE-3's training-time test, arXiv
2503.01840).

The head's own vectors replace the rows that are not known yet, for as many steps as it learns to draft.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.heads.foretold import Foretold
from models.training.heads.learner import Learner, positions
from models.training.heads.store import Lesson
from models.training.llama import angles, rotate
from models.training.recipe import Shape

_STRIDE = 3


@dataclass(frozen=True, slots=True)
class Known:
    """Keys and values [N, kv_heads, K, head_dim] so far: those of the true rows, then of each step."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """The positions of a step's rows: their rotations, and the keys that each sees (None: those up to its own)."""

    turns: tuple[Tensor, Tensor]
    seen: Tensor | None


class ChainAttention(nn.Module):
    """Attention over vectors of `width`. Each row sees the true rows up to its own, and the later ones of its chain."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, place: Place, before: Known | None) -> tuple[Tensor, Known]:
        batch, count, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, count, -1, self._shape.head_dim).transpose(1, 2)

        queries, keys, values = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        queries, keys = rotate(queries, *place.turns), rotate(keys, *place.turns)
        if before is not None:
            keys, values = torch.cat((before.keys, keys), dim=2), torch.cat((before.values, values), dim=2)
        repeat = self._shape.heads // self._shape.kv_heads
        shared, held = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        mixed = functional.scaled_dot_product_attention(queries, shared, held, place.seen, is_causal=place.seen is None)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, count, -1))
        return out, Known(keys, values)


class ChainLearner(Learner):
    """A head of `shape` that learns chains of `steps` tokens; each step's loss weighs `decay` times the previous
    one."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, steps: int, decay: float) -> None:
        super().__init__()
        self._steps, self._decay = steps, decay
        cos, sin = angles(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @abstractmethod
    def features(self, lesson: Lesson, count: int) -> Tensor:
        """Returns the features of the windows' first `count` rows, [N, count, W]."""

    @abstractmethod
    def advance(
        self, features: Tensor, tokens: Tensor, place: Place, known: Known | None
    ) -> tuple[Tensor, Known | None]:
        """Returns vectors [N, R, H] of features and the tokens [N, R] after them, and the extended keys and values."""

    @abstractmethod
    def last(self, x: Tensor) -> Tensor:
        """Returns the output layer's input for these vectors."""

    @abstractmethod
    def next_features(self, x: Tensor) -> Tensor:
        """Returns what replaces the next feature."""

    def forward(self, lesson: Lesson) -> list[Foretold]:
        """Drafts a chain after each row r: step i reads token r + i + 1 and predicts token r + i + 2."""
        count = lesson.tokens.shape[1] - self._steps
        rows = torch.arange(count, device=lesson.tokens.device)
        place = Place((self.cos[rows], self.sin[rows]), None)
        feature, known, found = self.features(lesson, count), None, []
        for step in range(self._steps):
            if step == 1:
                rows = self._followed(lesson, rows)
                feature = feature[:, rows]
            if step:
                place = Place((self.cos[rows + step], self.sin[rows + step]), _seen(rows, count, step))
            x, known = self.advance(feature, lesson.tokens[:, rows + step + 1], place, known)
            where = positions(lesson, rows + step + 1)
            found.append(Foretold(self.last(x).flatten(0, 1), where, self._decay**step))
            feature = self.next_features(x)
        return found

    def _followed(self, lesson: Lesson, rows: Tensor) -> Tensor:
        """In training only some rows' chains are continued: neighbouring chains are similar, and cost as much."""
        return rows[int(lesson.tokens.sum()) % _STRIDE :: _STRIDE] if self.training else rows


def _seen(rows: Tensor, count: int, steps: int) -> Tensor:
    """Returns a mask [R, count + steps * R]: rows see the true rows up to their own, and their own row of each step."""
    true = torch.arange(count, device=rows.device) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return torch.cat((true, *[own] * steps), dim=1)
