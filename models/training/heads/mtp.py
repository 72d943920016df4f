"""A head of the target's own kind (MTP) for training: one of its layers over a row behind the norm and the next token.

Of the published layouts MiMo's, whose layer is a Llama's. Embedding and output layer are the target's. As in FastMTP
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

_DECAY = 0.6
_PREFIX = "model.mtp_layers.0."


class Mtp(ChainLearner):
    """A layer of the target's own shape."""

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

    def features(self, lesson: Lesson, count: int) -> Tensor:
        normed: Tensor = self._subject.model.norm(lesson.rows[:, :count, -1].float())
        return normed

    def advance(self, features: Tensor, tokens: Tensor, place: Place, known: Known | None) -> tuple[Tensor, Known]:
        embedded = self.token_layernorm(self._subject.model.embed_tokens(tokens).float())
        x = self.input_proj(torch.cat((self.hidden_layernorm(features), embedded), dim=-1)).float()
        mixed, known = self.self_attn(self.input_layernorm(x), place, known)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), known

    def last(self, x: Tensor) -> Tensor:
        normed: Tensor = self.final_layernorm(x)
        return normed

    def onward(self, x: Tensor) -> Tensor:
        return self.last(x)

    @property
    def output(self) -> Tensor:
        return self._subject.words

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The head's tensors alone, beside the target's config, which says that there is one."""
        tensors = {_PREFIX + name: value.half() for name, value in self.state_dict().items()}
        return {**self._subject.config, "num_nextn_predict_layers": 1}, tensors
