"""Learner of early-exit adapters for a frozen target (`drafters.heads.early_exit`).

A low-rank map of the normed row is added to an early layer's row, so that the target's own norm and output layer can
read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.foretold import Foretold
from models.training.heads.learner import Learner, Subject, positions
from models.training.heads.store import Lesson

_TAP = 1  # the middle one of a lesson's layers


class EarlyExit(Learner):
    """An adapter with a map of rank `rank`."""

    def __init__(self, subject: Subject, rank: int, seed: int) -> None:
        super().__init__()
        shape = subject.model.shape
        self._subject, self._rank = subject, rank
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.down = nn.Linear(shape.hidden, rank, bias=False)
        self.up = nn.Linear(rank, shape.hidden, bias=False)
        self.know(subject)
        self.draw(seed)

    def forward(self, lesson: Lesson) -> list[Foretold]:
        """Predicts at each row the same token as the last layer."""
        rows = lesson.rows[:, :, _TAP].float()
        adapted = rows + self.up(self.down(self.norm(rows))).float()
        everywhere = torch.arange(rows.shape[1], device=rows.device)
        return [Foretold(self._subject.model.norm(adapted).flatten(0, 1), positions(lesson, everywhere), 1.0)]

    @property
    def output(self) -> Tensor:
        return self._subject.words

    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shape = self._subject.model.shape
        config = {
            "model_type": "early_exit_adapter",
            "exit_layer": self._subject.taps[_TAP] + 1,
            "rank": self._rank,
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "num_hidden_layers": shape.layers,
            "rms_norm_eps": shape.norm_epsilon,
            "torch_dtype": "float16",
        }
        return config, {name: value.half() for name, value in self.state_dict().items()}
