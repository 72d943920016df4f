"""MTP heads: a layer like the target's, over the normed last row and the next token's embedding.

The published layout is MiMo's, with a Llama's layer. Embedding and output layer are the target's. As in FastMTP
(arXiv 2509.18362) the one layer learns several steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.chains import ChainAttention, ChainHead, KeysValues, StepPositions
from models.training.heads.head import Target
from models.training.heads.store import Batch
from models.training.llama import Mlp
from models.training.loop import autocast

_DECAY = 0.6
_RIDGE = 0.01
_PREFIX = "model.mtp_layers.0."


class Mtp(ChainHead):
    """An MTP head: one layer of the target's shape."""

    def __init__(self, target: Target, steps: int, seed: int) -> None:
        shape = target.model.shape
        super().__init__(shape, steps, _DECAY)
        self._target = target
        self.token_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.hidden_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = ChainAttention(shape, shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = Mlp(shape)
        self.final_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.set_vocabulary(target)
        self.init_random(seed)

    @torch.no_grad()
    def init_from(self, batch: Batch) -> None:
        """Copies the target's last layer, and fits the projection to that layer's input by least squares."""
        model, last = self._target.model, self._target.model.layers[-1]
        for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
            getattr(self, name).load_state_dict(last.get_submodule(name).state_dict())
        self.final_layernorm.load_state_dict(model.norm.state_dict())
        tokens = batch.tokens[:, 1:]
        with autocast(tokens.device):
            last_input = [model.embed_tokens(batch.tokens), *model.hidden_states(batch.tokens)][-2]
        x, y = self._inputs(self.features(batch, tokens.shape[1]), tokens).flatten(0, 1), last_input[:, 1:].float()
        gram, product = x.T @ x, x.T @ y.flatten(0, 1)
        gram += _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
        self.input_proj.weight.copy_(torch.linalg.solve(gram, product).T)

    def features(self, batch: Batch, count: int) -> Tensor:
        normed: Tensor = self._target.model.norm(batch.hidden[:, :count, -1].float())
        return normed

    def step(
        self, features: Tensor, tokens: Tensor, at: StepPositions, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        x = self.input_proj(self._inputs(features, tokens)).float()
        mixed, past = self.self_attn(self.input_layernorm(x), at, past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), past

    def _inputs(self, features: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.token_layernorm(self._target.model.embed_tokens(tokens).float())
        return torch.cat((self.hidden_layernorm(features), embedded), dim=-1)

    def output_input(self, x: Tensor) -> Tensor:
        normed: Tensor = self.final_layernorm(x)
        return normed

    def next_features(self, x: Tensor) -> Tensor:
        return self.output_input(x)

    @property
    def output_weight(self) -> Tensor:
        return self._target.model.output_weight

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the head's tensors, and the target's config with the number of MTP layers."""
        tensors = {_PREFIX + name: value.half() for name, value in self.state_dict().items()}
        return {**self._target.config, "num_nextn_predict_layers": 1}, tensors
