"""TrainableHead of DFlash heads (arXiv 2602.06036): one forward predicts a block of masks from the target's fused rows.

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

from models.training.heads.head import Target, TrainableHead
from models.training.heads.loss import Predictions
from models.training.heads.store import Batch
from models.training.llama import Mlp, apply_rope, rope_tables
from models.training.recipe import Shape

_GAMMA = 4.0  # a slot's loss weighs exp(-1 / gamma) times the previous one's
_PREFIX = 0.9  # frequency of a prefix relative to one that is a token shorter


@dataclass(frozen=True, slots=True)
class BlockPositions:
    """Cosines and sines of the positions of the hidden states (`context`) and of the blocks' tokens, and the mask of
    what the tokens see of both."""

    context: tuple[Tensor, Tensor]
    tokens: tuple[Tensor, Tensor]
    mask: Tensor


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_epsilon)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.norm_epsilon)

    def forward(self, x: Tensor, context: Tensor, at: BlockPositions) -> Tensor:
        queries = apply_rope(self.q_norm(self._heads(self.q_proj(x)).float()), *at.tokens)
        parts = [self._keys_values(context, at.context), self._keys_values(x, at.tokens)]
        keys, values = (torch.cat(both, dim=2) for both in zip(*parts, strict=True))
        mixed = functional.scaled_dot_product_attention(
            queries.to(values.dtype), keys, values, at.mask, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        values = self._heads(self.v_proj(x))
        keys = apply_rope(self.k_norm(self._heads(self.k_proj(x)).float()), *rope)
        return keys.to(values.dtype), values

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, context: Tensor, at: BlockPositions) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, at)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlash(TrainableHead):
    """A head that reads blocks of a token and `depth` mask tokens (`mask`), and predicts the latter. `prefixes`: some
    blocks begin with known tokens in training."""

    cos: Tensor
    sin: Tensor

    def __init__(self, target: Target, layers: int, depth: int, mask: int, seed: int, prefixes: bool = False) -> None:
        super().__init__()
        shape = target.model.shape
        self._target, self._depth, self._mask, self._with_prefixes = target, depth, mask, prefixes
        self.fc = nn.Linear(len(target.taps) * shape.hidden, shape.hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        cos, sin = rope_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.set_vocabulary(target)
        self.init_random(seed)

    def forward(self, batch: Batch) -> list[Predictions]:
        """Step i has the slots i after the last known token; the target predicts their tokens one position earlier."""
        length, size = batch.tokens.shape[1], self._depth + 1
        anchors = torch.arange(1 + int(batch.tokens.sum()) % size, length - size, size, device=batch.tokens.device)
        positions = anchors[:, None] + torch.arange(size, device=anchors.device)
        known = self._prefix_lengths(batch, len(anchors))
        context_positions = torch.arange(length, device=anchors.device)
        at = BlockPositions(
            self._rope(context_positions), self._rope(positions.flatten()), _block_mask(anchors, length, size)
        )
        context = self.hidden_norm(self.fc(batch.hidden.flatten(2)).float())
        x = self._embed_blocks(batch.tokens[:, positions], known)
        for layer in self.layers:
            x = layer(x, context, at)
        hidden = self.norm(x).unflatten(1, (len(anchors), size))
        steps = []
        for step in range(1, size):
            window, block = (known + step < size).nonzero(as_tuple=True)
            slot = known[window, block] + step
            predicted = window * length + anchors[block] + slot - 1
            steps.append(Predictions(hidden[window, block, slot], predicted, math.exp((1 - step) / _GAMMA)))
        return steps

    def _prefix_lengths(self, batch: Batch, blocks: int) -> Tensor:
        """Returns how many tokens after the anchor are known [N, blocks]: fixed for a batch, 0 outside training."""
        count = len(batch.tokens)
        if not (self._with_prefixes and self.training):
            return torch.zeros((count, blocks), dtype=torch.int64, device=batch.tokens.device)
        generator = torch.Generator().manual_seed(int(batch.tokens.sum()))
        weights = _PREFIX ** torch.arange(self._depth)
        drawn = torch.multinomial(weights, count * blocks, replacement=True, generator=generator)
        return drawn.view(count, blocks).to(batch.tokens.device)

    def _embed_blocks(self, tokens: Tensor, known: Tensor) -> Tensor:
        """Returns embeddings [N, blocks * size, H] of these tokens [N, blocks, size], masked after the known ones."""
        is_masked = torch.arange(tokens.shape[2], device=tokens.device) > known[..., None]
        return self._target.model.embed_tokens(tokens.masked_fill(is_masked, self._mask).flatten(1)).float()

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.cos[positions], self.sin[positions]

    @property
    def output_weight(self) -> Tensor:
        return self._target.model.output_weight

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shape = self._target.model.shape
        own: dict[str, Any] = {"mask_token_id": self._mask, "target_layer_ids": list(self._target.taps)}
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
        # In float16 block heads overflow.
        return config, {name: value.bfloat16() for name, value in self.state_dict().items()}


def _block_mask(anchors: Tensor, length: int, size: int) -> Tensor:
    """Returns the mask [blocks * size, length + blocks * size]: tokens see the hidden states before their anchor, and
    their own block."""
    before = torch.arange(length, device=anchors.device) < anchors.repeat_interleave(size)[:, None]
    own = torch.eye(len(anchors), dtype=torch.bool, device=anchors.device)
    return torch.cat((before, own.repeat_interleave(size, 0).repeat_interleave(size, 1)), dim=1)
