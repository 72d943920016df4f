"""The target's side of residual sampling: accept a drawn token with min(1, p/q), else draw from max(p - q, 0).

Leviathan, Kalman and Matias (arXiv 2211.17192), algorithm 1, for any q a chain was drawn from: a sparse one that comes
with it, or a certain one (one-hot: accept with p(x), else draw from p without x). Log space, float32. The randomness is
keyed by (seed, position, purpose), so every position is decided once, by noise that no drafter knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.engine.noise import Purpose, exponential_numpy, gumbel_numpy, stream
from outrider.engine.sampling import History, Sampler
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.sparse import SparseQ

Floats = np.ndarray[Any, np.dtype[np.float32]]


class ResidualSampler(Sampler):
    """A target's sampler: its scores' argmax is a draw from p; `accepted` and `instead` rule on chains."""

    def __init__(self, params: SamplingParams, vocab_size: int, constraint: Constraint | None = None) -> None:
        super().__init__(params, vocab_size, constraint=constraint)
        seed = params.seed or 0
        self._noise_seed = stream(seed, Purpose.RESAMPLE)
        self._accept_seed = stream(seed, Purpose.ACCEPT)

    @property
    def noisy(self) -> bool:
        return True

    def log_p(self, logits: mx.array, histories: Sequence[History] | None = None) -> Floats:
        """The target's own log-probabilities, as warped, normalised, [R, V]. Waits."""
        if self.filters:
            warped = self.warped(logits, histories)
        else:
            warped = self.penalise(logits, histories) * (1.0 / self.params.temp)
        if mx.default_device().type == mx.cpu:  # where numpy is ten times quicker
            return _normalised(np.array(warped, copy=False))
        return np.array(warped - mx.logsumexp(warped, axis=-1, keepdims=True), copy=False)

    def accepted(self, log_p: Floats, positions: Sequence[int], chain: Sequence[int], q: SparseQ) -> int:
        """How many tokens of `chain`, drawn from `q`, hold: each with probability min(1, p/q), up to the first not.

        Args:
            log_p: [K, V], one row a token of the chain.
            positions: absolute positions of its tokens.

        Raises:
            InvalidRequest: the chain can't have been drawn from q.
        """
        if not q.fits(chain):
            raise InvalidRequest(f"q does not fit the chain {list(chain)}; expected what its tokens were drawn from")
        tokens, last = np.asarray(chain), log_p.shape[1] - 1
        own = np.where(tokens <= last, log_p[np.arange(len(chain)), np.minimum(tokens, last)], -np.inf)
        # An exponential clock is later than log q/p, strictly, with probability min(1, p/q).
        holds = exponential_numpy(self._accept_seed, positions) > np.log(q.of(chain)) - own
        return len(chain) if holds.all() else int(holds.argmin())

    def instead(self, log_p: Floats, position: int, q: SparseQ | None) -> int:
        """The token at `position` where a draw from the one row of `q` did not hold: from max(p - q, 0), normalised.

        From p where that is 0 everywhere, and where `q` is None: there was no draw.
        """
        scores = (log_p if q is None else residual(log_p, q)) + self._noise_at(position)
        return int(scores.argmax())

    def _noise_at(self, position: int) -> Floats:
        if mx.default_device().type == mx.cpu:  # one row, not the block that `noise` would make
            alone: Floats = gumbel_numpy(self._noise_seed, [position], self.vocab_size)[0]
            return alone
        return np.array(self.noise([position])[0], copy=False)


def residual(log_p: Floats, q: SparseQ) -> Floats:
    """log max(p - q, 0), not normalised, [V]; log p where that is nothing. Off q's support it is log p anyway."""
    known = q.ids[0] < len(log_p)
    ids = q.ids[0][known]
    left = np.exp(log_p[ids]) - q.probs[0][known]
    rest = log_p.copy()
    rest[ids] = np.log(left, out=np.full_like(left, -np.inf), where=left > 0)
    return rest if rest.max() > -np.inf else log_p


def _normalised(scores: Floats) -> Floats:
    below = scores - scores.max(axis=-1, keepdims=True)
    normalised: Floats = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
    return normalised


def target_sampler(params: SamplingParams, vocab_size: int, constraint: Constraint | None = None) -> Sampler:
    """The sampler by which a target chooses tokens for these parameters."""
    if params.is_residual:
        return ResidualSampler(params, vocab_size, constraint)
    greedy = params.temp == 0  # such choices round as mlx-lm's do
    return Sampler(params, vocab_size, normalised=greedy, constraint=constraint)
