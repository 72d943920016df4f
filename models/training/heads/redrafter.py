"""Learner of ReDrafter heads (arXiv 2403.09919): one row of the target, and a recurrent state over drafted tokens.

Parameters have the names of Apple's checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.heads.chains import ChainLearner, Known, Place
from models.training.heads.learner import Subject, directions
from models.training.heads.store import Lesson

_DECAY = 1.0


class ResBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class Redrafter(ChainLearner):
    """A ReDrafter head; `width`: of its output layer's input."""

    def __init__(self, subject: Subject, width: int, steps: int, seed: int) -> None:
        shape = subject.model.shape
        super().__init__(shape, steps, _DECAY)
        self._subject, self._width = subject, width
        if width != 2 * shape.hidden:
            self.input_proj = nn.Linear(2 * shape.hidden, width)
        self.lm_head = nn.ModuleList([ResBlock(width), nn.Linear(width, shape.vocab, bias=False)])
        self.rnn_u = nn.Linear(shape.hidden, shape.hidden)
        self.rnn_w = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.know(subject)
        self.draw(seed)
        self._begin_with(subject)

    def features(self, lesson: Lesson, count: int) -> Tensor:
        row = self._subject.model.norm(lesson.rows[:, :count, -1].float())
        return torch.cat((row, torch.zeros_like(row)), dim=-1)

    def advance(self, features: Tensor, tokens: Tensor, place: Place, known: Known | None) -> tuple[Tensor, None]:
        row, state = features.chunk(2, dim=-1)
        embedded = self._subject.model.embed_tokens(tokens).float()
        state = functional.silu(self.rnn_w(embedded) + self.rnn_u(state))
        return torch.cat((row, state.float()), dim=-1), None

    def last(self, x: Tensor) -> Tensor:
        narrow = self.input_proj(x) if hasattr(self, "input_proj") else x
        out: Tensor = self.lm_head[0](narrow)
        return out

    def next_features(self, x: Tensor) -> Tensor:
        return x

    @property
    def output(self) -> Tensor:
        matrix: Tensor = self.lm_head[1].weight
        return matrix

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shape = self._subject.model.shape
        config = {
            "model_type": "recurrent_drafting_drafter",
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "exit_dim": self._width,
            "num_draft_layers": 1,
            "rnn": True,
            "emb_norm": False,
            "torch_dtype": "float16",
        }
        return config, {name: value.half() for name, value in self.state_dict().items()}

    @torch.no_grad()
    def _begin_with(self, subject: Subject) -> None:
        """Initialises output layer and projection with the target's, projected to its principal directions."""
        chosen = directions(subject.words, min(self._width, subject.model.shape.hidden))
        self.lm_head[1].weight[:, : chosen.shape[1]] = subject.words.float().cpu() @ chosen
        if hasattr(self, "input_proj"):
            self.input_proj.weight[: chosen.shape[1], : chosen.shape[0]] = chosen.T
