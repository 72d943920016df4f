"""A Llama in PyTorch with Hugging Face's parameter names, for training, generation and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.recipe import Shape


class LayerCache(Protocol):
    """The KV cache of one layer."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Appends the keys and values of new tokens [batch, kv_heads, new, head_dim], and returns the attention of
        their queries to all tokens in the cache, in the shape of `queries`."""
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.head_dim).transpose(1, 2)

        queries, keys, values = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        queries, keys = apply_rope(queries, cos, sin), apply_rope(keys, cos, sin)
        if cache is None:
            mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        else:
            mixed = cache.attend(queries, keys, values)
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
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
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(seed)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden_states(tokens)[-1])

    def hidden_states(
        self, tokens: Tensor, start: int | Tensor = 0, caches: Sequence[LayerCache] | None = None
    ) -> list[Tensor]:
        """Returns the output of each layer [batch, length, hidden]. `start`: the first token's position, or [batch]."""
        if isinstance(start, Tensor):
            positions = start[:, None] + torch.arange(tokens.shape[1], device=start.device)
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        else:
            cos, sin = (table[start : start + tokens.shape[1]] for table in (self.cos, self.sin))
        x, states = self.embed_tokens(tokens).float(), []
        for number, layer in enumerate(self.layers):
            x = layer(x, cos, sin, None if caches is None else caches[number])
            states.append(x)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of outputs of the last layer."""
        return functional.linear(self.norm(hidden), self.output_weight)

    @property
    def output_weight(self) -> Tensor:
        """The matrix of the output layer [vocab, hidden]."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # Projections into the residual stream start smaller, so that depth does not raise its variance.
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = 0.02 / (2 * self.shape.layers) ** 0.5 if residual else 0.02
            nn.init.normal_(parameter, std=scale, generator=generator)


def decode_attention(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the attention of one token per sequence. Query heads that share keys become rows, so keys are read
    once."""
    grouped = queries.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[-1])
    return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(queries.shape)


def sample(logits: Tensor, temps: Tensor, generator: torch.Generator) -> Tensor:
    """Samples a token for each row of logits [N, vocab] at its temperature of `temps` [N]; the most likely one at 0.

    Computes argmax(logits + T * Gumbel noise), which takes less time than torch.multinomial.
    """
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(min=1e-30)
    negative_noise = uniform.log_().neg_().log_().mul_(temps[:, None])  # exponential_ takes ten times as long
    return negative_noise.sub_(logits).argmin(dim=-1)


def top_log_probs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns ids and log-probabilities [..., count] of the most likely tokens, most likely first."""
    logits = logits.float()
    top = logits.topk(count, dim=-1)
    return top.indices, top.values - logits.logsumexp(dim=-1, keepdim=True)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embeddings to x [..., length, head_dim]; dimension i is paired with i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of the rotary position embedding, [context, head_dim] each."""
    frequencies = shape.rope_base ** (-torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(shape.context).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()
