"""The draft's loss: the divergence of its distribution from the teacher's, KL(teacher || draft), per position.

Only the teacher's best tokens are known; all others are one lump. This is a lower bound of the full divergence that
still penalises a draft that gives the lump more mass than the teacher does.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_to_teacher(logits: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """Returns the mean nats per position. `logits` [..., vocab]; the teacher's `ids` and `log_probs` [..., top]."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    kept = logits.gather(-1, ids) - total[..., None]
    rest = logits.scatter(-1, ids, float("-inf")).logsumexp(dim=-1) - total
    weights = log_probs.exp()
    teacher_rest = (1 - weights.sum(dim=-1)).clamp(min=0)
    # xlogy is 0 where the teacher's lump is 0, where the log is infinite.
    lump = torch.xlogy(teacher_rest, teacher_rest) - teacher_rest * rest
    return ((weights * (log_probs - kept)).sum(dim=-1) + lump).mean()
