"""Lets a target write text for heads: many windows together, token by token.

Each window begins with a piece of real text, and the target continues it to its end. All windows are at the same
position, so a step is one forward over one token of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.training.llama import Llama, attend_one
from models.training.loop import autocast


class Window:
    """A layer's KV cache of all windows, for up to `length` tokens."""

    def __init__(self, batch: int, length: int, model: Llama, device: torch.device) -> None:
        shape = (2, batch, model.shape.kv_heads, length, model.shape.head_dim)
        self._room = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._count = 0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Adds the keys and values of a token; its queries attend to all."""
        at, self._count = self._count, self._count + keys.shape[2]
        self._room[0, :, :, at : self._count] = keys
        self._room[1, :, :, at : self._count] = values
        return attend_one(queries, self._room[0, :, :, : self._count], self._room[1, :, :, : self._count])


@torch.no_grad()
def write(model: Llama, windows: Tensor, given: Tensor, temps: Tensor, generator: torch.Generator) -> None:
    """Fills `windows` [N, L] after their first `given` [N] tokens, each at its temperature of `temps` [N]."""
    count, length = windows.shape
    if int(given.min()) >= length:
        return
    layers = [Window(count, length, model, windows.device) for _ in range(model.shape.layers)]
    for at in range(length - 1):
        with autocast(windows.device):
            logits = model.logits(model.rows(windows[:, at : at + 1], at, layers)[-1])[:, 0]
        chosen = _choose(logits.float(), temps, generator)
        windows[:, at + 1] = torch.where(given > at + 1, windows[:, at + 1], chosen)


def _choose(logits: Tensor, temps: Tensor, generator: torch.Generator) -> Tensor:
    """Samples as argmax(logits + T * Gumbel noise): at temperature T, or the best token at 0."""
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device).clamp_(min=1e-30)
    noise = uniform.log_().neg_().log_().mul_(temps[:, None])  # exponential_ takes ten times as long
    return logits.sub_(noise).argmax(dim=-1)
