"""The draft in training: trainable copies of target layers between the target's frozen embedding and output layer.

Computes the draft's agreement with the target over a batch of samples, from which the loss is made, also with weights
rounded as they will be stored.
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

from models.training.draft.store import Sample
from models.training.llama import Block, Llama, rope_tables
from models.training.loop import autocast
from models.training.quantise import fake_quantise

_RIDGE = 100.0  # regularises the lens in directions with little data
_CHUNK = 512  # positions per product with the output layer
_MIN_LOG_PROB = -40.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of B samples. `tokens` [B, L]; `positions` [P]: flat positions with predictions of the target, `ids` and
    `log_probs` [P, top]; `sample` [P]: the sample of each position."""

    tokens: Tensor
    positions: Tensor
    ids: Tensor
    log_probs: Tensor
    sample: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device, max_length: int) -> Batch:
        """Returns a batch of the first `max_length` tokens of these samples."""
        used = [sample for sample in samples if sample.first < max_length]
        length = min(max_length, max(len(sample.tokens) for sample in used))
        tokens = torch.zeros(len(used), length, dtype=torch.long)
        positions, ids, log_probs, owners = [], [], [], []
        for number, sample in enumerate(used):
            end = min(length, len(sample.tokens))
            count = end - sample.first
            tokens[number, :end] = sample.tokens[:end]
            positions.append(number * length + torch.arange(sample.first, end))
            ids.append(sample.ids[:count].long())
            log_probs.append(sample.log_probs[:count].float())
            owners.append(torch.full((count,), number))
        joined = (torch.cat(part).to(device, non_blocking=True) for part in (positions, ids, log_probs, owners))
        return cls(tokens.to(device), *joined)


class DraftModel(nn.Module):
    """A draft, initialised with `layers` of the target. `vocab_ids` [V_d]: the target's tokens in its vocabulary,
    ascending; `mlp`: the width of its MLPs (None: the target's).

    `lens` [H, H] maps its outputs to inputs of the target's output layer, of which `output_weight` [V_d, H] has the
    rows for its vocabulary. `draft_ids` [V]: its own id of each target token, or -1.
    """

    cos: Tensor
    sin: Tensor
    draft_ids: Tensor
    embedding: Tensor
    output_weight: Tensor

    def __init__(self, target: Llama, layers: Sequence[int], vocab_ids: Tensor, mlp: int | None = None) -> None:
        super().__init__()
        shape = target.shape
        self.vocab_ids = vocab_ids
        self.layers = nn.ModuleList(Block(shape) for _ in layers)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_epsilon)
        for layer, number in zip(self.layers, layers, strict=True):
            layer.load_state_dict({key: value.float() for key, value in target.layers[number].state_dict().items()})
            if mlp is not None:
                _prune_mlp(layer, mlp)
        self.lens = nn.Parameter(torch.eye(shape.hidden))
        draft_ids = torch.full((shape.vocab,), -1)
        draft_ids[vocab_ids] = torch.arange(len(vocab_ids))
        cos, sin = rope_tables(shape)
        output_weight = target.output_weight.detach()[vocab_ids]
        for name, tensor in (
            ("draft_ids", draft_ids), ("cos", cos), ("sin", sin),
            ("embedding", target.embed_tokens.weight.detach()), ("output_weight", output_weight),
        ):  # fmt: skip
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns inputs of the target's output layer [B, L, H]."""
        return functional.linear(self.hidden_states(tokens), self.lens)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Returns the last layer's output after the norm [B, L, H]."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = functional.embedding(tokens, self.embedding).float()
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits of its vocabulary [..., V_d]."""
        return functional.linear(x, self.output_weight)

    @torch.no_grad()
    def fit_lens(self, target: Llama, samples: Sequence[Sample]) -> None:
        """Sets the lens to the least-squares map from its outputs to the target's over these samples."""
        hidden = len(self.lens)
        gram, product = torch.zeros(2, hidden, hidden, device=self.lens.device)
        for sample in samples:
            tokens = sample.tokens[None].long().to(self.lens.device)
            x = self.hidden_states(tokens)[0].float()
            gram += x.T @ x
            with autocast(tokens.device, self.output_weight.dtype):
                y = target.hidden_states(tokens)[-1]
            product += x.T @ target.norm(y)[0].float()
        gram += _RIDGE * torch.eye(hidden, device=gram.device)
        self.lens.copy_(torch.linalg.solve(gram, product).T)

    @torch.no_grad()
    def init_from_draft(self, parameters: Mapping[str, Tensor]) -> None:
        """Loads the parameters of a draft with as many layers or fewer. The additional layers output zeros at first."""
        self.load_state_dict(dict(parameters), strict=False)
        for number, layer in enumerate(self.layers):
            if f"layers.{number}.self_attn.o_proj.weight" not in parameters:
                nn.init.zeros_(layer.self_attn.o_proj.weight)
                nn.init.zeros_(layer.mlp.down_proj.weight)

    @contextmanager
    def fake_quantised(self) -> Iterator[None]:
        """Rounds the layers' matrices to 4 bits within the block. Gradients apply to the full matrices
        (straight-through)."""
        matrices = [module.weight for module in self.layers.modules() if isinstance(module, nn.Linear)]
        full = [matrix.data for matrix in matrices]
        for matrix in matrices:
            matrix.data = fake_quantise(matrix.data)
        try:
            yield
        finally:
            for matrix, data in zip(matrices, full, strict=True):
                matrix.data = data


def _prune_mlp(layer: Block, width: int) -> None:
    """Keeps the `width` strongest columns of the layer's MLP."""
    gate, up, down = layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj
    strength = gate.weight.norm(dim=1) * up.weight.norm(dim=1) * down.weight.norm(dim=0)
    kept = strength.topk(width).indices.sort().values
    for linear, weight in ((gate, gate.weight[kept]), (up, up.weight[kept]), (down, down.weight[:, kept])):
        linear.weight = nn.Parameter(weight.detach().clone())
        linear.out_features, linear.in_features = weight.shape


@dataclass(frozen=True, slots=True)
class Agreement:
    """Comparison with the target at P positions. `cross_entropy` [P]; `greedy` [P]: whether the most likely tokens are
    equal; `coupled` [P]: a lower bound of the probability that both sample the same token with the same noise."""

    cross_entropy: Tensor
    greedy: Tensor
    coupled: Tensor


def compare_with_target(draft: DraftModel, batch: Batch, *, temp: float, top: int = 32) -> Agreement:
    """Compares draft and target at the batch's positions. `coupled` is for `temp`, over the `top` tokens."""
    x = draft(batch.tokens).flatten(0, 1)[batch.positions]
    chunks = zip(x.split(_CHUNK), batch.ids.split(_CHUNK), batch.log_probs.split(_CHUNK), strict=True)
    compared = [_compare(draft, *chunk, temp, top) for chunk in chunks]
    return Agreement(*(torch.cat(part) for part in zip(*compared, strict=True)))


def _compare(
    draft: DraftModel, x: Tensor, ids: Tensor, log_probs: Tensor, temp: float, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    ids = draft.draft_ids[ids]
    known = ids >= 0
    logits, log_sum, warm_log_sum, best = _GatherLogSumExp.apply(draft.logits(x), ids.clamp(min=0), temp)
    cross_entropy = -(log_probs.exp() * (logits - log_sum) * known).sum(dim=-1)
    warm_log_probs = torch.where(known, logits / temp, -math.inf) - warm_log_sum
    greedy = best[:, 0] == ids[:, 0]
    return cross_entropy, greedy, coupled_agreement(log_probs[:, :top], warm_log_probs[:, :top], temp)


class _GatherLogSumExp(torch.autograd.Function):
    """Computes from logits [P, V]: the logits of `ids` [P, n], and as columns [P, 1] the log-sum-exp of the logits,
    that of logits / `temp`, and the most likely token.

    It goes through chunks that stay in a CPU's cache. The autograd of single operations would move the whole matrix
    through memory about 20 times, which costs more than the matrix products.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temp: float) -> tuple[Tensor, ...]:
        parts = []
        for chunk in logits.split(_chunk_rows(logits)):
            x = chunk.float()
            parts.append((x.logsumexp(1, True), (x / temp).logsumexp(1, True), x.max(1, True).indices))
        log_sum, warm_log_sum, best = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, ids, log_sum, warm_log_sum)
        ctx.temp = temp
        ctx.mark_non_differentiable(best)
        return logits.gather(1, ids).float(), log_sum, warm_log_sum, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ids_grad, log_sum_grad, warm_log_sum_grad, _ = grads
        logits, ids, log_sum, warm_log_sum = ctx.saved_tensors
        logits_grad = torch.empty_like(logits)
        step = _chunk_rows(logits)
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            x = logits[rows].float()
            warm = (x / ctx.temp).sub_(warm_log_sum[rows]).exp_().mul_(warm_log_sum_grad[rows] / ctx.temp)
            x.sub_(log_sum[rows]).exp_().mul_(log_sum_grad[rows]).add_(warm)
            logits_grad[rows] = x.scatter_add_(1, ids[rows], ids_grad[rows])
        return logits_grad, None, None


def _chunk_rows(logits: Tensor) -> int:
    """Returns how many rows are computed at once: all on a GPU."""
    return len(logits) if logits.is_cuda else 16


def coupled_agreement(target: Tensor, draft: Tensor, temp: float) -> Tensor:
    """Returns a lower bound [P] of the probability that argmax(log p / T + G) and argmax(log q / T + G) are the same
    token, with the same Gumbel noise G.

    It is sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) over the target's most likely tokens: log-probabilities [P, top] of
    the `target` at T = 1 and of the `draft` at `temp`. The other tokens count as if their probabilities added up in
    both.
    """
    rest = (1 - target.exp().sum(dim=-1, keepdim=True)).clamp(min=0)
    warm = target / temp
    min_rest = rest * (target[:, -1:] * (1 / temp - 1)).exp()  # no token of the rest is more likely than the last one
    log_p = warm - torch.log(warm.exp().sum(dim=-1, keepdim=True) + min_rest)
    log_q = draft.clamp(min=_MIN_LOG_PROB)
    rest_p, rest_q = (1 - log.exp().sum(dim=-1, keepdim=True) for log in (log_p, log_q))
    ratios = torch.maximum(log_p[:, None] - log_p[..., None], log_q[:, None] - log_q[..., None]).exp().sum(dim=-1)
    ratios = ratios + rest_p.clamp(min=0) * (-log_p).exp() + rest_q.clamp(min=0) * (-log_q).exp()
    return (1 / ratios).sum(dim=-1)
