"""ReDrafter heads (arXiv 2403.09919): one hidden state of the target, and a recurrent state over drafted tokens.

Parameters have the names of Apple's checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.heads.chains import ChainHead, KeysValues, StepPositions
from models.training.heads.head import Target, principal_directions
from models.training.heads.store import Batch

_DECAY = 1.0


class ResBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.silu(self.linear(x))


class Redrafter(ChainHead):
    """A ReDrafter head. `width`: of the output layer's input."""

    def __init__(self, target: Target, width: int, steps: int, seed: int) -> None:
        shape = target.model.shape
        super().__init__(shape, steps, _DECAY)
        self._target, self._width = target, width
        if width != 2 * shape.hidden:
            self.input_proj = nn.Linear(2 * shape.hidden, width)
        self.lm_head = nn.ModuleList([ResBlock(width), nn.Linear(width, shape.vocab, bias=False)])
        self.rnn_u = nn.Linear(shape.hidden, shape.hidden)
        self.rnn_w = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.set_vocabulary(target)
        self.init_random(seed)
        self._init_from_target()

    def features(self, batch: Batch, count: int) -> Tensor:
        hidden = self._target.model.norm(batch.hidden[:, :count, -1].float())
        return torch.cat((hidden, torch.zeros_like(hidden)), dim=-1)

    def step(self, features: Tensor, tokens: Tensor, at: StepPositions, past: KeysValues | None) -> tuple[Tensor, None]:
        hidden, state = features.chunk(2, dim=-1)
        embedded = self._target.model.embed_tokens(tokens).float()
        state = functional.silu(self.rnn_w(embedded) + self.rnn_u(state))
        return torch.cat((hidden, state.float()), dim=-1), None

    def output_input(self, x: Tensor) -> Tensor:
        narrow = self.input_proj(x) if hasattr(self, "input_proj") else x
        out: Tensor = self.lm_head[0](narrow)
        return out

    def next_features(self, x: Tensor) -> Tensor:
        return x

    @property
    def output_weight(self) -> Tensor:
        matrix: Tensor = self.lm_head[1].weight
        return matrix

    def export(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        shape = self._target.model.shape
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
    def _init_from_target(self) -> None:
        """Initialises output layer and projection with the target's, projected to its principal directions."""
        output_weight = self._target.model.output_weight
        directions = principal_directions(output_weight, min(self._width, self._target.model.shape.hidden))
        self.lm_head[1].weight[:, : directions.shape[1]] = output_weight.float().cpu() @ directions
        if hasattr(self, "input_proj"):
            self.input_proj.weight[: directions.shape[1], : directions.shape[0]] = directions.T
