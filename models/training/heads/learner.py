"""The interface of a head that learns. A new kind is one file that offers it, and a line in `texts.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.foretold import Foretold
from models.training.heads.store import Lesson
from models.training.llama import Llama


@dataclass(frozen=True, slots=True)
class Subject:
    """What a head is made for. `model`: frozen, and no part of the head; `taps`: whose rows lessons hold; `ids` [V_d]:
    the target's tokens that the head is to know; `rarest`: the one that its text has least; `config`: the target's."""

    model: Llama
    taps: tuple[int, ...]
    ids: Tensor
    rarest: int
    config: dict[str, Any]

    @property
    def words(self) -> Tensor:
        """The target's output layer [V, H]."""
        layer = self.model.embed_tokens if self.model.lm_head is None else self.model.lm_head
        return layer.weight


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

    def begin(self, lesson: Lesson) -> None:
        """Stand where these windows show that learning can begin; by default where it was drawn."""

    def know(self, subject: Subject) -> None:
        """Name its tokens."""
        names = torch.full((subject.model.shape.vocab,), -1, device=subject.ids.device)
        numbers = torch.arange(len(subject.ids), device=subject.ids.device)
        self.register_buffer("names", names.index_copy(0, subject.ids, numbers), persistent=False)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Matrices small and random, the same for a seed; biases 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def positions(lesson: Lesson, rows: Tensor) -> Tensor:
    """These positions [R] of every window, counted through the lesson."""
    count, length = lesson.tokens.shape
    return (torch.arange(count, device=rows.device)[:, None] * length + rows).flatten()


def directions(words: Tensor, count: int) -> Tensor:
    """Those in which words [V, H] differ most, [H, count]."""
    wide = words.float().cpu()
    _, _, found = torch.linalg.svd(wide.T @ wide)
    return found[:count].T
