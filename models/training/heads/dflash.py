"""Learner of DFlash heads (arXiv 2602.06036): one forward predicts a block of masks from the target's fused rows.

Many blocks of a window train together; each sees the rows before its anchor, and itself. With prefixes (D2SD, arXiv
2606.04446) some tokens after the anchor are known, too, like those of an outcome without rows. Parameters have z-lab's
names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.heads.foretold import Foretold
from models.training.heads.learner import Learner, Subject
from models.training.heads.store import Lesson
from models.training.llama import Mlp, angles, rotate
from models.training.recipe import Shape

_GAMMA = 4.0  # a slot's loss weighs exp(-1 / gamma) times the previous one's
_PREFIX = 0.9  # frequency of a prefix relative to one with a token less


@dataclass(frozen=True, slots=True)
class Blocks:
    """Rotations of the window's rows and of the blocks' tokens, and the mask of what the tokens see of both."""

    of_rows: tuple[Tensor, Tensor]
    of_tokens: tuple[Tensor, Tensor]
    seen: Tensor


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_epsilon)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_epsilon)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        queries = rotate(self.q_norm(self._heads(self.q_proj(x)).float()), *blocks.of_tokens)
        kept = [self._kept(vectors, turns) for vectors, turns in ((context, blocks.of_rows), (x, blocks.of_tokens))]
        repeat = self._shape.heads // self._shape.kv_heads
        keys, values = (torch.cat(both, dim=2).repeat_interleave(repeat, 1) for both in zip(*kept, strict=True))
        mixed = functional.scaled_dot_product_attention(queries.to(values.dtype), keys, values, blocks.seen)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _kept(self, vectors: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        values = self._heads(self.v_proj(vectors))
        keys = rotate(self.k_norm(self._heads(self.k_proj(vectors)).float()), *turns)
        return keys.to(values.dtype), values

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self._shape.head_dim)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, context: Tensor, blocks: Blocks) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, blocks)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlash(Learner):
    """A head that predicts blocks of a token and `depth` masks (token `mask`). `prefixes`: train with known
    prefixes."""

    cos: Tensor
    sin: Tensor

    def __init__(self, subject: Subject, layers: int, depth: int, mask: int, seed: int, prefixes: bool = False) -> None:
        super().__init__()
        shape = subject.model.shape
        self._subject, self._depth, self._mask, self._with_prefixes = subject, depth, mask, prefixes
        self.fc = nn.Linear(len(subject.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        cos, sin = angles(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.know(subject)
        self.draw(seed)

    def forward(self, lesson: Lesson) -> list[Foretold]:
        """Step i has the slots i after the last known token; the target predicts them at the row before."""
        length, size = lesson.tokens.shape[1], self._depth + 1
        anchors = torch.arange(1 + int(lesson.tokens.sum()) % size, length - size, size, device=lesson.tokens.device)
        places = anchors[:, None] + torch.arange(size, device=anchors.device)
        known = self._known(lesson, len(anchors))
        rows = torch.arange(length, device=anchors.device)
        blocks = Blocks(self._turns(rows), self._turns(places.flatten()), _seen(anchors, length, size))
        context = self.hidden_norm(self.fc(lesson.rows.flatten(2)).float())
        x = self._opened(lesson.tokens[:, places], known)
        for layer in self.layers:
            x = layer(x, context, blocks)
        hidden = self.norm(x).unflatten(1, (len(anchors), size))
        steps = []
        for step in range(1, size):
            window, block = (known + step < size).nonzero(as_tuple=True)
            slot = known[window, block] + step
            where = window * length + anchors[block] + slot - 1
            steps.append(Foretold(hidden[window, block, slot], where, math.exp((1 - step) / _GAMMA)))
        return steps

    def _known(self, lesson: Lesson, blocks: int) -> Tensor:
        """Returns how many tokens after the anchor are known, [N, A]: fixed for a lesson, 0 outside training."""
        count = len(lesson.tokens)
        if not (self._with_prefixes and self.training):
            return torch.zeros((count, blocks), dtype=torch.int64, device=lesson.tokens.device)
        generator = torch.Generator().manual_seed(int(lesson.tokens.sum()))
        often = _PREFIX ** torch.arange(self._depth)
        drawn = torch.multinomial(often, count * blocks, replacement=True, generator=generator)
        return drawn.view(count, blocks).to(lesson.tokens.device)

    def _opened(self, tokens: Tensor, known: Tensor) -> Tensor:
        """Returns embeddings [N, A * size, H] of blocks of these tokens [N, A, size], with masks after the known
        ones."""
        hidden = torch.arange(tokens.shape[2], device=tokens.device) > known[..., None]
        return self._subject.model.embed_tokens(tokens.masked_fill(hidden, self._mask).flatten(1)).float()

    def _turns(self, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[at], self.sin[at]

    @property
    def output(self) -> Tensor:
        return self._subject.words

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shape = self._subject.model.shape
        own: dict[str, Any] = {"mask_token_id": self._mask, "target_layer_ids": list(self._subject.taps)}
        if self._with_prefixes:
            own |= {"loss_type": "variable_prefix", "prefix_weight_base": _PREFIX}
        config = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": shape.hidden,
            "num_hidden_layers": len(self.layers),
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.mlp,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_theta": shape.rope_base,
            "max_position_embeddings": shape.context,
            "vocab_size": shape.vocab,
            "block_size": self._depth + 1,
            "num_target_layers": shape.layers,
            "dflash_config": own,
            "torch_dtype": "bfloat16",
        }
        # Not float16, in which block heads overflow.
        return config, {name: value.bfloat16() for name, value in self.state_dict().items()}


def _seen(anchors: Tensor, length: int, size: int) -> Tensor:
    """Returns the mask [A * size, length + A * size]: tokens see the rows before their anchor, and their own block."""
    before = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(size)[:, None]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    return torch.cat((before, own.repeat_interleave(size, 0).repeat_interleave(size, 1)), dim=1)
