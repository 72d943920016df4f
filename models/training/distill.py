"""The draft's loss: how far its distribution is from the teacher's, KL(teacher || draft), per position.

The teacher is known by its best tokens; all others are one lump, so this is a lower bound of the full divergence, and
exact in what matters: the draft must give the lump no more mass than the teacher does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_to_teacher(logits: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """Mean nats a position; logits [..., vocab], the teacher's ids and log-probabilities [..., top], top < vocab."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    kept = logits.gather(-1, ids) - total[..., None]
    rest = logits.scatter(-1, ids, float("-inf")).logsumexp(dim=-1) - total
    weights = log_probs.exp()
    teacher_rest = (1 - weights.sum(dim=-1)).clamp(min=0)
    # xlogy is 0 where the teacher's lump is 0, and its log would not be.
    lump = torch.xlogy(teacher_rest, teacher_rest) - teacher_rest * rest
    return ((weights * (log_probs - kept)).sum(dim=-1) + lump).mean()
