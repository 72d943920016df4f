"""The draft as it learns: some of the target's layers, between its embedding and output layer, which stay as they are.

The loss over a batch of answers, the share of choices that are the target's own, and weights as they will be stored.
Knows answers and tensors; nothing of files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.training.draft.quantise import rounded
from models.training.draft.store import Answer
from models.training.llama import Block, Llama, angles

_RIDGE = 100.0  # keeps the lens small where rows tell little
_PIECE = 512  # rows of the output layer at a time
_NEVER = -40.0  # a log-probability that is as good as none


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers side by side: `tokens` [B, L]; `rows` [P], positions counted through them, at which the target's view is
    kept: `ids` [P, top] and `log_probs` [P, top]; `answers` [P]: whose."""

    tokens: Tensor
    rows: Tensor
    ids: Tensor
    log_probs: Tensor
    answers: Tensor

    @classmethod
    def of(cls, answers: Sequence[Answer], device: torch.device, longest: int) -> Batch:
        """The first `longest` tokens of these answers."""
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
    """Begins as `layers` of the target. `outputs` [V_d]: ids of the tokens that it can say, ascending.

    `lens` [H, H] turns its rows into those that the target's output layer reads.
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
        """Rows for the target's output layer [B, L, H]."""
        return functional.linear(self.normed(tokens), self.lens)

    def normed(self, tokens: Tensor) -> Tensor:
        """What the last layer puts out, behind the norm [B, L, H]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = functional.embedding(tokens, self.embedding).float()
        for layer in self.layers:
            x = layer(x, cos, sin)
        found: Tensor = self.norm(x)
        return found

    def logits(self, rows: Tensor) -> Tensor:
        """Of the tokens that it can say [..., V_d]."""
        return functional.linear(rows, self.words)

    @torch.no_grad()
    def begin(self, target: Llama, answers: Sequence[Answer]) -> None:
        """Set the lens to what turns rows into the target's own, by least squares over these answers."""
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
        """Start with the parameters of a draft with fewer layers; those that it lacks put out nothing at first."""
        self.load_state_dict(dict(trained), strict=False)
        for number, layer in enumerate(self.layers):
            if f"layers.{number}.self_attn.o_proj.weight" not in trained:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)

    @contextmanager
    def stored(self) -> Iterator[None]:
        """Within, the layers' matrices are as 4 bits hold them; gradients are for the whole ones (straight through)."""
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
    """Of P positions: `divergence` [P], cross entropy with the target; `best` [P], whether the draft's likeliest token
    is the target's; `coupled` [P], the chance, at least, that both choose the same under the same noise."""

    divergence: Tensor
    best: Tensor
    coupled: Tensor


def marks(draft: Draft, batch: Batch, *, temp: float, top: int = 32) -> Marks:
    """How the draft's view compares with the target's at the batch's positions; `top` bounds the work for `coupled`."""
    hidden = draft(batch.tokens).flatten(0, 1)[batch.rows]
    pieces = [
        _marks(draft, *of, temp, top)
        for of in zip(hidden.split(_PIECE), batch.ids.split(_PIECE), batch.log_probs.split(_PIECE), strict=True)
    ]
    return Marks(*(torch.cat(part) for part in zip(*pieces, strict=True)))


def _marks(draft: Draft, hidden: Tensor, ids: Tensor, target: Tensor, temp: float, top: int) -> tuple[Tensor, ...]:
    logits = draft.logits(hidden).float()
    names = draft.names[ids]
    known = names >= 0
    found = logits.gather(1, names.clamp(min=0))
    log_q = found - logits.logsumexp(dim=-1, keepdim=True)
    divergence = -(target.exp() * log_q * known).sum(dim=-1)
    best = logits.detach().argmax(dim=-1) == names[:, 0]
    warm = torch.where(known, found / temp, -math.inf) - (logits / temp).logsumexp(dim=-1, keepdim=True)
    return divergence, best, coupled(target[:, :top], warm[:, :top], temp)


def coupled(target: Tensor, draft: Tensor, temp: float) -> Tensor:
    """A lower bound [P] of the chance that argmax(log p / T + G) and argmax(log q / T + G) are one token for one G.

    sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), over the target's likeliest tokens [P, top]: `target` at T = 1, `draft`
    at `temp`. All other tokens count as if their shares added up in both.
    """
    outside = (1 - target.exp().sum(dim=-1, keepdim=True)).clamp(min=0)
    heated = target / temp
    least = outside * (target[:, -1:] * (1 / temp - 1)).exp()  # none outside is likelier than the last
    log_p = heated - torch.log(heated.exp().sum(dim=-1, keepdim=True) + least)
    log_q = draft.clamp(min=_NEVER)
    rest_p, rest_q = (1 - log.exp().sum(dim=-1, keepdim=True) for log in (log_p, log_q))
    ratios = torch.maximum(log_p[:, None] - log_p[..., None], log_q[:, None] - log_q[..., None]).exp().sum(dim=-1)
    ratios = ratios + rest_p.clamp(min=0) * (-log_p).exp() + rest_q.clamp(min=0) * (-log_q).exp()
    return (1 / ratios).sum(dim=-1)


def _narrow(layer: Block, mlp: int) -> None:
    """Keep the MLP's strongest columns."""
    gate, up, down = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
    strength = gate.weight.norm(dim=1) * up.weight.norm(dim=1) * down.weight.norm(dim=0)
    kept = strength.topk(mlp).indices.sort().values
    for linear, weight in ((gate, gate.weight[kept]), (up, up.weight[kept]), (down, down.weight[:, kept])):
        linear.weight = nn.Parameter(weight.detach().clone())
        linear.out_features, linear.in_features = weight.shape
