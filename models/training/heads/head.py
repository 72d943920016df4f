"""The interface of a head in training. A new kind is one file that implements it, and a line in `pipeline.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.loss import Predictions
from models.training.heads.store import Batch
from models.training.llama import Llama


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a head. `model`: frozen; `taps`: the layers whose hidden states are in batches; `vocab_ids` [V_d]:
    the target's tokens in the head's vocabulary; `rarest`: the rarest token in its text; `config`: its config.json."""

    model: Llama
    taps: tuple[int, ...]
    vocab_ids: Tensor
    rarest: int
    config: dict[str, Any]


class TrainableHead(nn.Module, ABC):
    """A head in training. Its parameters do not include the target's.

    `draft_ids` [V]: the head's id of each target token, -1 for tokens that its vocabulary lacks.
    """

    draft_ids: Tensor

    @abstractmethod
    def forward(self, batch: Batch) -> list[Predictions]:
        """Returns the predictions for these windows, step by step."""

    @property
    @abstractmethod
    def output_weight(self) -> Tensor:
        """The matrix of the output layer [V_d, H]: a parameter, or the target's."""

    @abstractmethod
    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns config.json and tensors in a published layout."""

    def init_from(self, batch: Batch) -> None:
        """Initialises parameters from these windows. By default they stay random."""

    def set_vocabulary(self, target: Target) -> None:
        """Registers `draft_ids`."""
        draft_ids = torch.full((target.model.shape.vocab,), -1, device=target.vocab_ids.device)
        numbers = torch.arange(len(target.vocab_ids), device=target.vocab_ids.device)
        self.register_buffer("draft_ids", draft_ids.index_copy(0, target.vocab_ids, numbers), persistent=False)

    @torch.no_grad()
    def init_random(self, seed: int) -> None:
        """Initialises matrices with small random numbers, and biases with 0."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def flat_positions(batch: Batch, positions: Tensor) -> Tensor:
    """Returns the flat positions in the batch of these `positions` [R] of every window."""
    count, length = batch.tokens.shape
    return (torch.arange(count, device=positions.device)[:, None] * length + positions).flatten()


def principal_directions(weight: Tensor, count: int) -> Tensor:
    """Returns the first `count` principal directions of the rows of `weight` [V, H], as columns [H, count]."""
    wide = weight.float().cpu()
    _, _, directions = torch.linalg.svd(wide.T @ wide)
    return directions[:count].T
