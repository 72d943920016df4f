"""EAGLE-3 (arXiv 2503.01840) for training: a layer over three tapped rows and the next token's embedding.

Trained as it is used (the paper's training-time test): its own output stands in for rows that are not known yet, for as
many steps as it is to draft. Parameters carry the official checkpoint's names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.heads.foretold import Foretold
from models.training.heads.learner import Learner, positions
from models.training.heads.store import Lesson
from models.training.llama import Llama, Mlp, angles, rotate
from models.training.recipe import Shape

_DECAY = 0.8  # of a step's weight, a step
_STRIDE = 3


@dataclass(frozen=True, slots=True)
class Known:
    """Keys and values [N, kv_heads, K, head_dim] so far: the true rows', then those of one step after the other."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a step's rows stand: turns of their positions, which keys each sees (None: those up to its own)."""

    turns: tuple[Tensor, Tensor]
    seen: Tensor | None


class Attention(nn.Module):
    """Each row sees the true rows up to its own, and what its own chain has made of itself since."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        self.q_proj = nn.Linear(2 * shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
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


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, embedded: Tensor, place: Place, before: Known | None) -> tuple[Tensor, Known]:
        seen = torch.cat((self.input_layernorm(embedded), self.hidden_norm(x)), dim=-1)
        mixed, known = self.self_attn(seen, place, before)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), known


class Eagle3(Learner):
    """`shape`: the head's own, whose `vocab` is the draft vocabulary: the target's tokens `ids` [V_d]."""

    def __init__(self, shape: Shape, target: Llama, taps: tuple[int, ...], ids: Tensor, steps: int, seed: int) -> None:
        super().__init__()
        self._shape, self._target_shape, self._taps, self._steps = shape, target.shape, taps, steps
        hidden = shape.hidden
        self.fc = nn.Linear(len(taps) * target.shape.hidden, hidden, bias=False)
        self.embed_tokens = nn.Embedding(target.shape.vocab, hidden)
        self.midlayer = Layer(shape)
        self.norm = nn.RMSNorm(hidden, eps=shape.norm_epsilon)
        self.lm_head = nn.Linear(hidden, shape.vocab, bias=False)
        self.register_buffer("ids", ids, persistent=False)
        names = torch.full((target.shape.vocab,), -1).index_copy(0, ids, torch.arange(len(ids)))
        self.register_buffer("names", names, persistent=False)
        cos, sin = angles(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(target, seed)

    def forward(self, lesson: Lesson) -> list[Foretold]:
        """Row r is a chain behind the pairs up to r: its step i reads token r + i + 1 and foretells r + i + 2."""
        count = lesson.tokens.shape[1] - self._steps
        rows = torch.arange(count, device=lesson.tokens.device)
        place = Place(self._turns(rows), None)
        x, known, found = self.fc(lesson.rows[:, :count].flatten(2)).float(), None, []
        for step in range(self._steps):
            if step == 1:
                rows = self._followed(lesson, rows)
                x = x[:, rows]
            if step:
                place = Place(self._turns(rows + step), _seen(rows, count, step))
            embedded = self.embed_tokens(lesson.tokens[:, rows + step + 1])
            x, known = self.midlayer(x, embedded, place, known)
            where = positions(lesson, rows + step + 1)
            found.append(Foretold(self.norm(x).flatten(0, 1), where, _DECAY**step))
        return found

    def _followed(self, lesson: Lesson, rows: Tensor) -> Tensor:
        """In training not every row's chain is followed on: its next row's is nearly the same, and costs as much."""
        return rows[int(lesson.tokens.sum()) % _STRIDE :: _STRIDE] if self.training else rows

    def _turns(self, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[at], self.sin[at]

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """SpecForge's layout, which is SafeAI's with the layers named and an embedding of its own."""
        shape = self._shape
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": shape.hidden,
            "target_hidden_size": self._target_shape.hidden,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.mlp,
            "rms_norm_eps": shape.norm_epsilon,
            "rope_theta": shape.rope_base,
            "max_position_embeddings": shape.context,
            "vocab_size": self._target_shape.vocab,
            "draft_vocab_size": shape.vocab,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self._taps), "use_aux_hidden_state": True},
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "float16",
        }
        tensors = {name: value.half() for name, value in self.state_dict().items()}
        if shape.vocab == self._target_shape.vocab:
            return config, tensors
        known = torch.zeros(self._target_shape.vocab, dtype=torch.bool)
        known[self.ids] = True
        return config, tensors | {"d2t": self.ids - torch.arange(len(self.ids)), "t2d": known}

    @torch.no_grad()
    def _initialise(self, target: Llama, seed: int) -> None:
        """It begins with the target's own words, in the directions in which they differ most."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
        words = (target.embed_tokens if target.lm_head is None else target.lm_head).weight.float().cpu()
        _, _, directions = torch.linalg.svd(words.T @ words)
        chosen = directions[: self._shape.hidden].T
        self.embed_tokens.weight.copy_(target.embed_tokens.weight.float().cpu() @ chosen)
        self.lm_head.weight.copy_((words * target.norm.weight.cpu())[self.ids] @ chosen)
        self.fc.weight[:, -target.shape.hidden :] = chosen.T


def _seen(rows: Tensor, count: int, steps: int) -> Tensor:
    """Which keys rows [R] see, [R, count + steps * R]: the true ones up to their own, of the steps since their own."""
    true = torch.arange(count, device=rows.device) <= rows[:, None]
    own = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
    return torch.cat((true, *[own] * steps), dim=1)
