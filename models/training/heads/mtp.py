"""Learner of MTP heads: a layer like the target's, over the normed last row and the next token's embedding.

The published layout is MiMo's, with a Llama's layer. Embedding and output layer are the target's. As in FastMTP
(arXiv 2509.18362) the one layer learns several steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.chains import ChainAttention, ChainLearner, Known, Place
from models.training.heads.learner import Subject
from models.training.heads.store import Lesson
from models.training.llama import Mlp
from models.training.loop import autocast

_DECAY = 0.6
_RIDGE = 0.01
_PREFIX = "model.mtp_layers.0."


class Mtp(ChainLearner):
    """An MTP head: one layer of the target's shape."""

    def __init__(self, subject: Subject, steps: int, seed: int) -> None:
        shape = subject.model.shape
        super().__init__(shape, steps, _DECAY)
        self._subject = subject
        self.token_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.hidden_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.self_attn = ChainAttention(shape, shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.mlp = Mlp(shape)
        self.final_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.know(subject)
        self.draw(seed)

    @torch.no_grad()
    def begin(self, lesson: Lesson) -> None:
        """Copies the target's last layer, and fits the projection to that layer's input by least squares."""
        model, last = self._subject.model, self._subject.model.layers[-1]
        for part in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
            getattr(self, part).load_state_dict(last.get_submodule(part).state_dict())
        self.final_layernorm.load_state_dict(model.norm.state_dict())
        read = lesson.tokens[:, 1:]
        with autocast(read.device):
            entered = [model.embed_tokens(lesson.tokens), *model.rows(lesson.tokens)][-2]
        seen = self._seen(self.features(lesson, read.shape[1]), read).flatten(0, 1)
        shares, wanted = seen.T @ seen, seen.T @ entered[:, 1:].float().flatten(0, 1)
        shares += _RIDGE * shares.diagonal().mean() * torch.eye(len(shares), device=shares.device)
        self.input_proj.weight.copy_(torch.linalg.solve(shares, wanted).T)

    def features(self, lesson: Lesson, count: int) -> Tensor:
        normed: Tensor = self._subject.model.norm(lesson.rows[:, :count, -1].float())
        return normed

    def advance(self, features: Tensor, tokens: Tensor, place: Place, known: Known | None) -> tuple[Tensor, Known]:
        x = self.input_proj(self._seen(features, tokens)).float()
        mixed, known = self.self_attn(self.input_layernorm(x), place, known)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), known

    def _seen(self, features: Tensor, tokens: Tensor) -> Tensor:
        embedded = self.token_layernorm(self._subject.model.embed_tokens(tokens).float())
        return torch.cat((self.hidden_layernorm(features), embedded), dim=-1)

    def last(self, x: Tensor) -> Tensor:
        normed: Tensor = self.final_layernorm(x)
        return normed

    def next_features(self, x: Tensor) -> Tensor:
        return self.last(x)

    @property
    def output(self) -> Tensor:
        return self._subject.words

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the head's tensors, and the target's config with the number of MTP layers."""
        tensors = {_PREFIX + name: value.half() for name, value in self.state_dict().items()}
        return {**self._subject.config, "num_nextn_predict_layers": 1}, tensors
