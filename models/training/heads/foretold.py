"""A head's predictions, and their divergence from the target's: the loss of all kinds of heads.

Output layer and divergence are one function that processes rows in pieces. Logits of the whole vocabulary for every row
and step would take most of the memory, and moving them most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_PIECE = 256  # rows


@dataclass(frozen=True, slots=True)
class Foretold:
    """One step's predictions for M rows: `hidden` [M, H] for the output layer; `where` [M]: the flat positions in the
    lesson where the target predicts the same tokens; `weight`: the weight of the step's loss."""

    hidden: Tensor
    where: Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class Words:
    """The target's predictions at a lesson's positions: `ids` [P, top], in the head's vocabulary; `log_probs` [P, top].

    `known` [P, top]: whether the head has the token. Rows without their likeliest token do not count in the loss.
    """

    ids: Tensor
    log_probs: Tensor
    known: Tensor

    @classmethod
    def of(cls, ids: Tensor, log_probs: Tensor, names: Tensor) -> Words:
        """Converts target ids. `names` [V]: the head's id of each target token, -1 for tokens that it lacks."""
        own = names[ids.flatten(0, 1)]
        return cls(own.clamp(min=0), log_probs.flatten(0, 1), own >= 0)


def loss(steps: Sequence[Foretold], output: Tensor, words: Words) -> Tensor:
    """Returns the weighted mean divergence of the steps. `output` [V_d, H]: the output layer's matrix."""
    total = torch.zeros((), device=output.device)
    for step in steps:
        total = total + step.weight * divergence(step.hidden, output, words, step.where)
    return total / sum(step.weight for step in steps)


@torch.no_grad()
def agreement(steps: Sequence[Foretold], output: Tensor, words: Words) -> tuple[float, ...]:
    """Returns how often each step's best token is the target's."""
    found = []
    for step in steps:
        best = torch.cat([(piece.to(output.dtype) @ output.T).argmax(dim=-1) for piece in step.hidden.split(_PIECE)])
        right = (best == words.ids[step.where, 0]) & words.known[step.where, 0]
        found.append(right.float().mean().item())
    return tuple(found)


def divergence(hidden: Tensor, output: Tensor, words: Words, where: Tensor) -> Tensor:
    """Returns the mean KL(target || head) over rows; the target's tokens beyond its best ones are one lump."""
    known = words.known[where]
    taught = known[:, 0]
    masses = words.log_probs[where].exp()
    rest = (1 - masses.sum(dim=-1)).clamp(min=0)
    masses = masses * known
    scale = taught / (masses.sum(dim=-1) + rest)  # over the head's tokens only
    found: Tensor = _LumpedKl.apply(
        hidden, output, words.ids[where], masses * scale[:, None], known, rest * scale, taught.sum().clamp(min=1)
    )
    return found


class _LumpedKl(torch.autograd.Function):
    """Computes the gradients in the forward pass, where the logits exist; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, output: Tensor, *view: Tensor) -> Tensor:
        ids, masses, known, rest, count = view
        matrix, learns = output.bfloat16(), ctx.needs_input_grad[1]
        to_hidden, to_output = torch.empty_like(hidden), torch.zeros_like(output, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        for at in range(0, len(hidden), _PIECE):
            part = slice(at, at + _PIECE)
            rows = hidden[part].bfloat16()
            lost, gradient = _piece((rows @ matrix.T).float(), ids[part], masses[part], known[part], rest[part])
            total += lost
            small = (gradient / count).bfloat16()
            to_hidden[part] = (small @ matrix).to(hidden.dtype)
            if learns:
                to_output += small.T @ rows
        ctx.save_for_backward(to_hidden, to_output.to(output.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        to_hidden, to_output = ctx.saved_tensors
        return to_hidden * outer[0], to_output * outer[0], None, None, None, None, None


def _piece(logits: Tensor, ids: Tensor, masses: Tensor, known: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the summed divergence of rows, and its gradient by their logits. Rows without mass do not count."""
    shares = logits.softmax(dim=-1)
    kept = shares.gather(-1, ids) * known
    lump = (1 - kept.sum(dim=-1)).clamp(min=1e-6)
    lost = torch.xlogy(masses, masses) - torch.xlogy(masses, kept.clamp(min=1e-30))
    lost_lump = torch.xlogy(rest, rest) - rest * lump.log()
    alive = masses.sum(dim=-1) > 0
    gradient = shares * ((1 - rest / lump) * alive)[:, None]
    change = (kept - masses - gradient.gather(-1, ids)) * (known & alive[:, None])
    return lost.sum() + lost_lump.sum(), gradient.scatter_add_(-1, ids, change)
