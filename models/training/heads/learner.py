"""The interface of a head that learns. A new kind is one file that offers it, and a line in `kinds.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.foretold import Foretold
from models.training.heads.store import Lesson


class Learner(nn.Module, ABC):
    """`names` [V]: its name of each of the target's tokens, -1 for one that it lacks. No parameter is the target's."""

    names: Tensor

    @abstractmethod
    def forward(self, lesson: Lesson) -> list[Foretold]:
        """What it says of these windows, step by step."""

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """Its output layer's matrix [V_d, H]: a parameter, or the target's."""

    @abstractmethod
    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json and tensors, in the layout that is read elsewhere."""


def positions(lesson: Lesson, rows: Tensor) -> Tensor:
    """These positions [R] of every window, counted through the lesson."""
    count, length = lesson.tokens.shape
    return (torch.arange(count, device=rows.device)[:, None] * length + rows).flatten()
