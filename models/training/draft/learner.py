"""The draft during training: trainable copies of target layers between the target's frozen embedding and output layer.

Computes the loss over a batch of answers and the share of choices equal to the target's, also with weights rounded as
they will be stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.draft.quantise import rounded
from models.training.draft.store import Answer
from models.training.llama import Block, Llama, angles

_RIDGE = 100.0  # regularises the lens in directions with little data
_PIECE = 512  # rows per product with the output layer
_NEVER = -40.0  # the lowest log-probability that counts


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of answers. `tokens` [B, L]; `rows` [P], flat positions for which the target's likeliest tokens are
    stored: `ids` [P, top] and `log_probs` [P, top]; `answers` [P]: the answer of each position."""

    tokens: Tensor
    rows: Tensor
    ids: Tensor
    log_probs: Tensor
    answers: Tensor

    @classmethod
    def of(cls, answers: Sequence[Answer], device: torch.device, longest: int) -> Batch:
        """Returns a batch of the first `longest` tokens of these answers."""
        cut = [answer for answer in answers if len(answer.tokens) - len(answer.ids) < longest]
        length = min(longest, max(len(answer.tokens) for answer in cut))
        tokens = torch.zeros(len(cut), length, dtype=torch.long)
        rows, ids, log_probs, whose = [], [], [], []
        for number, answer in enumerate(cut):
            count = min(length, len(answer.tokens))
            tokens[number, :count] = answer.tokens[:count]
            first = len(answer.tokens) - len(answer.ids)
            rows.append(number * length + torch.arange(first, count))
            ids.append(answer.ids[: count - first])
            log_probs.append(answer.log_probs[: count - first].float())
            whose.append(torch.full((count - first,), number))
        parts = (torch.cat(part) for part in (rows, ids, log_probs, whose))
        row, token, log_prob, owner = (part.to(device, non_blocking=True) for part in parts)
        return cls(tokens.to(device), row, token.long(), log_prob, owner)


class Draft(nn.Module):
    """A draft, initialised with `layers` of the target. `outputs` [V_d]: ids of the tokens that it can draft,
    ascending.

    `lens` [H, H] maps its rows to those that the target's output layer reads.
    """

    cos: Tensor
    sin: Tensor
    names: Tensor
    outputs: Tensor
    embedding: Tensor
    words: Tensor

    def __init__(self, target: Llama, layers: Sequence[int], outputs: Tensor, mlp: int | None = None) -> None:
        super().__init__()
        shape = target.shape
        self.layers = nn.ModuleList(Block(shape) for _ in layers)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        for layer, number in zip(self.layers, layers, strict=True):
            layer.load_state_dict({key: value.float() for key, value in target.layers[number].state_dict().items()})
        self.lens = nn.Parameter(torch.eye(shape.hidden))
        if mlp is not None:
            for layer in self.layers:
                _narrow(layer, mlp)
        names = torch.full((shape.vocab,), -1)
        names[outputs] = torch.arange(len(outputs))
        cos, sin = angles(shape)
        output_rows = target.embed_tokens if target.lm_head is None else target.lm_head
        for name, tensor in (
            ("names", names), ("outputs", outputs), ("cos", cos), ("sin", sin),
            ("embedding", target.embed_tokens.weight.detach()), ("words", output_rows.weight.detach()[outputs]),
        ):  # fmt: skip
            self.register_buffer(name, tensor.clone() if name == "words" else tensor, persistent=name == "outputs")

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns rows for the target's output layer [B, L, H]."""
        return functional.linear(self.normed(tokens), self.lens)

    def normed(self, tokens: Tensor) -> Tensor:
        """Returns the last layer's output after the norm [B, L, H]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = functional.embedding(tokens, self.embedding).float()
        for layer in self.layers:
            x = layer(x, cos, sin)
        found: Tensor = self.norm(x)
        return found

    def logits(self, rows: Tensor) -> Tensor:
        """Returns logits of the tokens that it can draft [..., V_d]."""
        return functional.linear(rows, self.words)

    @torch.no_grad()
    def begin(self, target: Llama, answers: Sequence[Answer]) -> None:
        """Sets the lens to the least-squares map from its rows to the target's over these answers."""
        hidden = len(self.lens)
        square, product = torch.zeros(2, hidden, hidden, device=self.lens.device)
        for answer in answers:
            tokens = answer.tokens[None].long().to(self.lens.device)
            own = self.normed(tokens)[0].float()
            square += own.T @ own
            with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=self.words.dtype == torch.bfloat16):
                rows = target.rows(tokens)[-1]
            product += own.T @ target.norm(rows)[0].float()
        square += _RIDGE * torch.eye(hidden, device=square.device)
        self.lens.copy_(torch.linalg.solve(square, product).T)

    @torch.no_grad()
    def begin_as(self, trained: Mapping[str, Tensor]) -> None:
        """Loads the parameters of a draft with fewer layers; the additional layers output zeros at first."""
        self.load_state_dict(dict(trained), strict=False)
        for number, layer in enumerate(self.layers):
            if f"layers.{number}.self_attn.o_proj.weight" not in trained:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Rounds the layers' matrices to 4 bits within the block; gradients apply to the full ones
        (straight-through)."""
        matrices = [module.weight for module in self.layers.modules() if isinstance(module, nn.Linear)]
        whole = [matrix.data for matrix in matrices]
        for matrix in matrices:
            matrix.data = rounded(matrix.data)
        try:
            yield
        finally:
            for matrix, data in zip(matrices, whole, strict=True):
                matrix.data = data


@dataclass(frozen=True, slots=True)
class Marks:
    """Comparison with the target at P positions: `divergence` [P], the cross entropy; `best` [P], whether the likeliest
    tokens are equal; `coupled` [P], a lower bound of the chance that both choose the same token under equal noise."""

    divergence: Tensor
    best: Tensor
    coupled: Tensor


def marks(draft: Draft, batch: Batch, *, temp: float, top: int = 32) -> Marks:
    """Compares draft and target at the batch's positions; `top` limits the tokens for `coupled`."""
    hidden = draft(batch.tokens).flatten(0, 1)[batch.rows]
    pieces = [
        _marks(draft, *of, temp, top)
        for of in zip(hidden.split(_PIECE), batch.ids.split(_PIECE), batch.log_probs.split(_PIECE), strict=True)
    ]
    return Marks(*(torch.cat(part) for part in zip(*pieces, strict=True)))


def _marks(draft: Draft, hidden: Tensor, ids: Tensor, target: Tensor, temp: float, top: int) -> tuple[Tensor, ...]:
    names = draft.names[ids]
    known = names >= 0
    found, sums, warm_sums, likeliest = _LogSums.apply(draft.logits(hidden), names.clamp(min=0), temp)
    divergence = -(target.exp() * (found - sums) * known).sum(dim=-1)
    best = likeliest[:, 0] == names[:, 0]
    warm = torch.where(known, found / temp, -math.inf) - warm_sums
    return divergence, best, coupled(target[:, :top], warm[:, :top], temp)


class _LogSums(torch.autograd.Function):
    """Computes the logits of `names` [P, n] and three columns [P, 1]: the log-sum-exp of all `logits` [P, V], that of
    logits / `temp`, and the likeliest token. It goes through pieces that stay in a CPU's cache: the autograd of single
    operations would pass the whole matrix about 20 times through memory, which costs more than the matrix products."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, names: Tensor, temp: float) -> tuple[Tensor, ...]:
        parts = []
        for piece in logits.split(_rows_in_cache(logits)):
            whole = piece.float()
            parts.append((whole.logsumexp(1, True), (whole / temp).logsumexp(1, True), whole.max(1, True).indices))
        sums, warm_sums, likeliest = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, names, sums, warm_sums)
        ctx.temp = temp
        ctx.mark_non_differentiable(likeliest)
        return logits.gather(1, names).float(), sums, warm_sums, likeliest

    @staticmethod
    def backward(ctx: Any, *of: Tensor) -> tuple[Tensor, None, None]:
        by_name, by_sum, by_warm_sum, _ = of
        logits, names, sums, warm_sums = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        step = _rows_in_cache(logits)
        for at in range(0, len(logits), step):
            rows = slice(at, at + step)
            whole = logits[rows].float()
            warm = (whole / ctx.temp).sub_(warm_sums[rows]).exp_().mul_(by_warm_sum[rows] / ctx.temp)
            whole.sub_(sums[rows]).exp_().mul_(by_sum[rows]).add_(warm)
            gradient[rows] = whole.scatter_add_(1, names[rows], by_name[rows])
        return gradient, None, None


def _rows_in_cache(logits: Tensor) -> int:
    """Returns how many rows are computed at once: all on a GPU."""
    return len(logits) if logits.is_cuda else 16


def coupled(target: Tensor, draft: Tensor, temp: float) -> Tensor:
    """Returns a lower bound [P] of the chance that argmax(log p / T + G) and argmax(log q / T + G) are the same token.

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), over the target's likeliest tokens [P, top]: `target` at T = 1, `draft`
    at `temp`. All other tokens count as if their shares added up in both.
    """
    outside = (1 - target.exp().sum(dim=-1, keepdim=True)).clamp(min=0)
    heated = target / temp
    least = outside * (target[:, -1:] * (1 / temp - 1)).exp()  # no token outside is likelier than the last one
    log_p = heated - torch.log(heated.exp().sum(dim=-1, keepdim=True) + least)
    log_q = draft.clamp(min=_NEVER)
    rest_p, rest_q = (1 - log.exp().sum(dim=-1, keepdim=True) for log in (log_p, log_q))
    ratios = torch.maximum(log_p[:, None] - log_p[..., None], log_q[:, None] - log_q[..., None]).exp().sum(dim=-1)
    ratios = ratios + rest_p.clamp(min=0) * (-log_p).exp() + rest_q.clamp(min=0) * (-log_q).exp()
    return (1 / ratios).sum(dim=-1)


def _narrow(layer: Block, mlp: int) -> None:
    """Reduces the MLP to its strongest columns."""
    gate, up, down = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
    strength = gate.weight.norm(dim=1) * up.weight.norm(dim=1) * down.weight.norm(dim=0)
    kept = strength.topk(mlp).indices.sort().values
    for linear, weight in ((gate, gate.weight[kept]), (up, up.weight[kept]), (down, down.weight[:, kept])):
        linear.weight = nn.Parameter(weight.detach().clone())
        linear.out_features, linear.in_features = weight.shape
