"""The interface of a trainable head. A new kind is one file that implements it, and a line in `kinds.py`."""

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
    """The target of a head. `model`: frozen, not part of the head; `taps`: the layers with rows in lessons; `ids`
    [V_d]: the target's tokens in the head's vocabulary; `rarest`: the rarest token in its text; `config`: the
    target's."""

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
    """A trainable head. `names` [V]: its id of each target token, -1 for tokens that it lacks. Its parameters do not
    include the target's."""

    names: Tensor

    @abstractmethod
    def forward(self, lesson: Lesson) -> list[Foretold]:
        """Returns the predictions for these windows, step by step."""

    @property
    @abstractmethod
    def output(self) -> Tensor:
        """The output layer's matrix [V_d, H]: a parameter, or the target's."""

    @abstractmethod
    def published(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns config.json and tensors in a published layout."""

    def begin(self, lesson: Lesson) -> None:
        """Initialises parameters from these windows; by default they stay as drawn."""

    def know(self, subject: Subject) -> None:
        """Sets the head's vocabulary."""
        names = torch.full((subject.model.shape.vocab,), -1, device=subject.ids.device)
        numbers = torch.arange(len(subject.ids), device=subject.ids.device)
        self.register_buffer("names", names.index_copy(0, subject.ids, numbers), persistent=False)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Initialises matrices with small random numbers by seed, and biases with 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def positions(lesson: Lesson, rows: Tensor) -> Tensor:
    """Returns the flat positions of rows [R] in every window of the lesson."""
    count, length = lesson.tokens.shape
    return (torch.arange(count, device=rows.device)[:, None] * length + rows).flatten()


def directions(words: Tensor, count: int) -> Tensor:
    """Returns the principal directions [H, count] of words [V, H]."""
    wide = words.float().cpu()
    _, _, found = torch.linalg.svd(wide.T @ wide)
    return found[:count].T
