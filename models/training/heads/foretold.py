"""What a head says of tokens to come, and how far that is from what the target says: the loss that all kinds share.

The output layer and its divergence are one function that goes through its rows in pieces: logits of a whole vocabulary
for every row and step would be most of the memory, and most of the time in moving them.
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
    """One step for M rows: `hidden` [M, H] for the output layer, and at which of a lesson's positions, counted through
    its windows, the target's word on the same token is: `where` [M]. `weight`: of its loss."""

    hidden: Tensor
    where: Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class Words:
    """The target's view at a lesson's positions: `ids` [P, top], the head's names; `log_probs` [P, top].

    `known` [P, top]: the head has that token. Rows whose likeliest token it lacks teach nothing.
    """

    ids: Tensor
    log_probs: Tensor
    known: Tensor

    @classmethod
    def of(cls, ids: Tensor, log_probs: Tensor, names: Tensor) -> Words:
        """`names` [V]: the head's name of each of the target's tokens, -1 for one that it lacks."""
        own = names[ids.flatten(0, 1)]
        return cls(own.clamp(min=0), log_probs.flatten(0, 1), own >= 0)


def loss(steps: Sequence[Foretold], output: Tensor, words: Words) -> Tensor:
    """Weighted mean divergence of the steps. `output` [V_d, H]: the output layer's matrix."""
    total = torch.zeros((), device=output.device)
    for step in steps:
        total = total + step.weight * divergence(step.hidden, output, words, step.where)
    return total / sum(step.weight for step in steps)


@torch.no_grad()
def agreement(steps: Sequence[Foretold], output: Tensor, words: Words) -> tuple[float, ...]:
    """How often each step's best token is the target's."""
    found = []
    for step in steps:
        best = torch.cat([(piece.to(output.dtype) @ output.T).argmax(dim=-1) for piece in step.hidden.split(_PIECE)])
        right = (best == words.ids[step.where, 0]) & words.known[step.where, 0]
        found.append(right.float().mean().item())
    return tuple(found)


def divergence(hidden: Tensor, output: Tensor, words: Words, where: Tensor) -> Tensor:
    """Mean KL(target || head) over rows. The target is known by its best tokens, all others are one lump."""
    known = words.known[where]
    taught = known[:, 0]
    masses = words.log_probs[where].exp()
    rest = (1 - masses.sum(dim=-1)).clamp(min=0)
    masses = masses * known
    scale = taught / (masses.sum(dim=-1) + rest)  # over the head's tokens alone
    found: Tensor = _LumpedKl.apply(
        hidden, output, words.ids[where], masses * scale[:, None], known, rest * scale, taught.sum().clamp(min=1)
    )
    return found


class _LumpedKl(torch.autograd.Function):
    """Makes the gradients on the way forward, where the logits are at hand; scaled on the way back."""

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
    """Summed divergence of rows, and its gradient by their logits. A row with no mass at all counts for nothing."""
    shares = logits.softmax(dim=-1)
    kept = shares.gather(-1, ids) * known
    lump = (1 - kept.sum(dim=-1)).clamp(min=1e-6)
    lost = torch.xlogy(masses, masses) - torch.xlogy(masses, kept.clamp(min=1e-30))
    lost_lump = torch.xlogy(rest, rest) - rest * lump.log()
    alive = masses.sum(dim=-1) > 0
    gradient = shares * ((1 - rest / lump) * alive)[:, None]
    change = (kept - masses - gradient.gather(-1, ids)) * (known & alive[:, None])
    return lost.sum() + lost_lump.sum(), gradient.scatter_add_(-1, ids, change)
