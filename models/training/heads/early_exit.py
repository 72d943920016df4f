"""TrainableHead of early-exit adapters for a frozen target (`drafters.heads.early_exit`).

A low-rank map of the normed row is added to an early layer's row, so that the target's own norm and output layer can
read it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from models.training.heads.head import Target, TrainableHead
from models.training.heads.loss import Predictions
from models.training.heads.store import Batch

_TAP = 1  # the middle one of the tapped layers


class EarlyExit(TrainableHead):
    """An adapter of rank `rank`."""

    def __init__(self, target: Target, rank: int, seed: int) -> None:
        super().__init__()
        shape = target.model.shape
        self._target, self._rank = target, rank
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        self.down = nn.Linear(shape.hidden, rank, bias=False)
        self.up = nn.Linear(rank, shape.hidden, bias=False)
        self.set_vocabulary(target)
        self.init_random(seed)

    def forward(self, batch: Batch) -> list[Predictions]:
        """Predicts at each position the same token as the last layer."""
        hidden = batch.hidden[:, :, _TAP].float()
        adapted = hidden + self.up(self.down(self.norm(hidden))).float()
        normed = self._target.model.norm(adapted).flatten(0, 1)
        return [Predictions(normed, torch.arange(len(normed), device=normed.device), 1.0)]

    @property
    def output_weight(self) -> Tensor:
        return self._target.model.output_weight

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shape = self._target.model.shape
        config = {
            "model_type": "early_exit_adapter",
            "exit_layer": self._target.taps[_TAP] + 1,
            "rank": self._rank,
            "hidden_size": shape.hidden,
            "vocab_size": shape.vocab,
            "num_hidden_layers": shape.layers,
            "rms_norm_eps": shape.norm_epsilon,
            "torch_dtype": "float16",
        }
        return config, {name: value.half() for name, value in self.state_dict().items()}
