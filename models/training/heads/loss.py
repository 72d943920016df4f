"""The loss of all kinds of heads: the divergence of a head's predictions from the target's, KL(target || head).

Of the target only the most likely tokens are known; all others count as one token, the rest. Output layer and
divergence are one function that goes through the positions in chunks: logits of the whole vocabulary for every position
and step would take most of the memory, and moving them most of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 256  # positions


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of one draft step. `hidden` [M, H]: the output layer's input; `positions` [M]: the flat positions
    in the batch where the target predicts the same tokens; `weight`: of this step in the loss."""

    hidden: Tensor
    positions: Tensor
    weight: float


@dataclass(frozen=True, slots=True)
class TargetTopK:
    """The target's predictions at the P positions of a batch: `ids` [P, top] in the head's vocabulary, `log_probs`
    [P, top], and `known` [P, top], whether the head's vocabulary has the token.

    A position whose most likely token the head lacks does not count in the loss.
    """

    ids: Tensor
    log_probs: Tensor
    known: Tensor

    @classmethod
    def of(cls, ids: Tensor, log_probs: Tensor, draft_ids: Tensor) -> TargetTopK:
        """Converts target ids. `draft_ids` [V]: the head's id of each target token, -1 for tokens that it lacks."""
        own = draft_ids[ids.flatten(0, 1)]
        return cls(own.clamp(min=0), log_probs.flatten(0, 1), own >= 0)


def loss(steps: Sequence[Predictions], output_weight: Tensor, target: TargetTopK) -> Tensor:
    """Returns the weighted mean divergence of the steps. `output_weight` [V_d, H]: the output layer's matrix."""
    total = torch.zeros((), device=output_weight.device)
    for step in steps:
        total = total + step.weight * divergence(step.hidden, output_weight, target, step.positions)
    return total / sum(step.weight for step in steps)


@torch.no_grad()
def agreement(steps: Sequence[Predictions], output_weight: Tensor, target: TargetTopK) -> tuple[float, ...]:
    """Returns the share of positions where the head's most likely token is the target's, for each step."""
    shares = []
    for step in steps:
        chunks = step.hidden.split(_CHUNK)
        best = torch.cat([(chunk.to(output_weight.dtype) @ output_weight.T).argmax(dim=-1) for chunk in chunks])
        equal = (best == target.ids[step.positions, 0]) & target.known[step.positions, 0]
        shares.append(equal.float().mean().item())
    return tuple(shares)


def divergence(hidden: Tensor, output_weight: Tensor, target: TargetTopK, positions: Tensor) -> Tensor:
    """Returns the mean KL(target || head) over the positions [M] that `hidden` [M, H] predicts."""
    known = target.known[positions]
    counted = known[:, 0]
    probs = target.log_probs[positions].exp()
    rest = (1 - probs.sum(dim=-1)).clamp(min=0)
    probs = probs * known
    scale = counted / (probs.sum(dim=-1) + rest)  # the target's distribution over the head's tokens only
    mean: Tensor = _TopKDivergence.apply(
        hidden,
        output_weight,
        target.ids[positions],
        probs * scale[:, None],
        known,
        rest * scale,
        counted.sum().clamp(min=1),
    )
    return mean


class _TopKDivergence(torch.autograd.Function):
    """Computes the gradients in the forward pass, where the logits exist; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, output_weight: Tensor, *target: Tensor) -> Tensor:
        ids, probs, known, rest, count = target
        weight, needs_weight_grad = output_weight.bfloat16(), ctx.needs_input_grad[1]
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(output_weight, dtype=torch.float32)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            rows = hidden[chunk].bfloat16()
            logits = (rows @ weight.T).float()
            value, logits_grad = _divergence_and_grad(logits, ids[chunk], probs[chunk], known[chunk], rest[chunk])
            total += value
            logits_grad = (logits_grad / count).bfloat16()
            hidden_grad[chunk] = (logits_grad @ weight).to(hidden.dtype)
            if needs_weight_grad:
                weight_grad += logits_grad.T @ rows
        ctx.save_for_backward(hidden_grad, weight_grad.to(output_weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], weight_grad * grads[0], None, None, None, None, None


def _divergence_and_grad(
    logits: Tensor, ids: Tensor, probs: Tensor, known: Tensor, rest: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the summed divergence, and its gradient by the logits. Positions with zero `probs` do not count."""
    q = logits.softmax(dim=-1)
    q_top = q.gather(-1, ids) * known
    q_rest = (1 - q_top.sum(dim=-1)).clamp(min=1e-6)
    top_loss = torch.xlogy(probs, probs) - torch.xlogy(probs, q_top.clamp(min=1e-30))
    rest_loss = torch.xlogy(rest, rest) - rest * q_rest.log()
    counted = probs.sum(dim=-1) > 0
    grad = q * ((1 - rest / q_rest) * counted)[:, None]
    change = (q_top - probs - grad.gather(-1, ids)) * (known & counted[:, None])
    return top_loss.sum() + rest_loss.sum(), grad.scatter_add_(-1, ids, change)
