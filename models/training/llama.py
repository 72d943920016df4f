"""A Llama in PyTorch with Hugging Face's parameter names, for training, and for rows of trained models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.recipe import Shape


class KeysAndValues(Protocol):
    """One layer's KV cache."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Adds keys and values of new tokens [batch, kv_heads, new, head_dim]; attends to all. Shape as `queries`."""
        ...


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, before: KeysAndValues | None = None) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

        queries, keys, values = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        if before is None:
            mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            mixed = before.attend(queries, keys, values)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Pre-norm attention, then MLP, each added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, before: KeysAndValues | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, before)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Llama(nn.Module):
    """Maps tokens [batch, length] int64 to logits [batch, length, vocab]; length up to the shape's context."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.lm_head = None if shape.tied else nn.Linear(shape.hidden, shape.vocab, bias=False)
        cos, sin = angles(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.rows(tokens)[-1])

    def rows(self, tokens: Tensor, at: int | Tensor = 0, before: Sequence[KeysAndValues] | None = None) -> list[Tensor]:
        """Returns each layer's output [batch, length, hidden]; the first token is at position `at` (or [batch])."""
        if isinstance(at, Tensor):
            places = at[:, None] + torch.arange(tokens.shape[1], device=at.device)
            cos, sin = self.cos[places][:, None], self.sin[places][:, None]
        else:
            cos, sin = (table[at : at + tokens.shape[1]] for table in (self.cos, self.sin))
        x, found = self.embed_tokens(tokens).float(), []
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if before is None else before[number])
            found.append(x)
        return found

    def logits(self, row: Tensor) -> Tensor:
        """Returns the logits of the last layer's rows."""
        normed = self.norm(row)
        return functional.linear(normed, self.embed_tokens.weight) if self.lm_head is None else self.lm_head(normed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # Projections into the residual stream start smaller, so that depth does not raise its variance.
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 0.02 / (2 * self.shape.layers) ** 0.5 if residual else 0.02
            nn.init.normal_(parameter, std=scale, generator=generator)


def attend_one(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Computes the attention of one token; query heads that share keys become rows, so that keys are read once."""
    shared = queries.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[-1])
    return functional.scaled_dot_product_attention(shared, keys, values, attn_mask=mask).reshape(queries.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary positions to x [..., length, head_dim]; dimension i rotates with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def angles(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of every position's rotation, [context, head_dim] each."""
    frequencies = shape.rope_base ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    turns = torch.outer(torch.arange(shape.context).float(), frequencies).repeat(1, 2)
    return turns.cos(), turns.sin()
