"""Residual sampling: the drafter's draws from a sparse q, and the target's rejection sampling (Leviathan, Kalman and
Matias, arXiv 2211.17192, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.engine.noise import Purpose, derive_seed, exponential_numpy, gumbel_at
from outrider.engine.sampling import Floats, History, Ints, Sampler, SamplingMetadata, best_tokens
from outrider.engine.steps import Step, make_step
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ


class ResidualSampler(Sampler):
    """A target's sampler: the argmax of its scores is a draw from p; `accepted` and `resample` verify chains.

    Without a q from the drafter it is one-hot: x is accepted with p(x), else a token is drawn from p without x.
    Computed in log space, in float32. The randomness is keyed by (seed, position, purpose), so every position is
    decided once, by noise that no drafter knows.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, constraint: Constraint | None = None) -> None:
        super().__init__(params, vocab_size, normalised=False, constraint=constraint)
        seed = params.seed or 0
        self._noise_seed = derive_seed(seed, Purpose.RESAMPLE)
        self._accept_seed = derive_seed(seed, Purpose.ACCEPT)

    @property
    def has_noise(self) -> bool:
        return True

    def log_p(self, logits: mx.array, histories: Sequence[History] | None = None) -> Floats:
        """Returns the target's own log-probabilities, warped and normalised, [R, V]. Waits."""
        warped = np.array(self.filtered(self.penalise(logits, histories)), copy=False)
        below = warped - warped.max(axis=-1, keepdims=True)
        normalised: Floats = below - np.log(np.exp(below).sum(axis=-1, keepdims=True))
        return normalised

    def accepted(self, log_p: Floats, positions: Sequence[int], chain: Sequence[int], q: SparseQ) -> int:
        """Returns how many tokens of `chain`, drawn from `q`, are accepted: each with probability min(1, p/q), until
        one is rejected.

        Args:
            log_p: [K, V], one row for each token of the chain.
            positions: the absolute positions of its tokens.

        Raises:
            InvalidRequest: the chain can't have been drawn from q.
        """
        if not q.fits(chain):
            raise InvalidRequest(
                f"q does not fit the chain {list(chain)}; expected the distributions that its tokens were drawn from"
            )
        tokens, last = np.asarray(chain), log_p.shape[1] - 1
        own = np.where(tokens <= last, log_p[np.arange(len(chain)), np.minimum(tokens, last)], -np.inf)
        # A standard exponential is strictly greater than log q/p with probability min(1, p/q).
        holds = exponential_numpy(self._accept_seed, positions) > np.log(q.of(chain)) - own
        return len(chain) if holds.all() else int(holds.argmin())

    def resample(self, log_p: Floats, position: int, q: SparseQ | None) -> int:
        """Draws the token at `position` from max(p - q, 0), normalised, if a draw from the row `q` was rejected.

        Draws from p if that is 0 everywhere, or if `q` is None: there was no draft.
        """
        scores = (log_p if q is None else residual(log_p, q)) + np.array(self.noise_at(position), copy=False)
        return int(scores.argmax())


def residual(log_p: Floats, q: SparseQ) -> Floats:
    """Returns log max(p - q, 0), not normalised, [V]; log p if that is -inf everywhere. Off q's support it is log p."""
    known = q.ids[0] < len(log_p)
    ids = q.ids[0][known]
    left = np.exp(log_p[ids]) - q.probs[0][known]
    rest = log_p.copy()
    rest[ids] = np.log(left, out=np.full_like(left, -np.inf), where=left > 0)
    return rest if rest.max() > -np.inf else log_p


def make_target_sampler(params: SamplingParams, vocab_size: int, constraint: Constraint | None = None) -> Sampler:
    """Returns the sampler of a target for these parameters."""
    if params.is_residual:
        return ResidualSampler(params, vocab_size, constraint)
    greedy = params.temp == 0  # greedy choices round like mlx-lm's
    return Sampler(params, vocab_size, normalised=greedy, constraint=constraint)


@dataclass(frozen=True, slots=True)
class Draws:
    """How one request's chains are drawn: each node's continuation from a sparse q, which is kept.

    q is the drafter's warped distribution cut to its `width` likeliest tokens, with Saguaro's factor on the `cached`
    best, for which work ahead will prepare branches (SSD paper, definition 14), normalised.

    A draw is keyed by (seed, purpose, fork, position), and independent of all draws of the target. The fork is where
    its chain begins: the position of the last token above it that the drafter was given and did not draw. So no chain
    is drawn by noise that an earlier round has used. This matters, because a round's division of branches depends on
    the whole chain under verification, including the part that is rejected.
    """

    seed: int
    width: int
    saguaro: float
    cached: int

    @classmethod
    def of(cls, params: SamplingParams, cached: int) -> Draws | None:
        """Returns the draws of a request; None unless it uses residual sampling."""
        return cls(params.seed or 0, params.q_width, params.saguaro, cached) if params.is_residual else None

    def make_step(self, metadata: SamplingMetadata, logits: mx.array, forks: Sequence[int]) -> Step:
        """Returns the step of one text, as `engine.steps.make_step` does; its best tokens are draws."""
        seeds = [derive_seed(self.seed, Purpose.DRAFT, fork) for fork in forks]
        return make_step([metadata], logits, partial(DrawnStep, partial(draw_tokens, self, seeds, metadata.positions)))


class DrawnStep(Step):
    """A `Step` whose best tokens are draws, by numpy; `candidates` are still the likeliest tokens."""

    def __init__(
        self,
        draw: Callable[[Floats], tuple[Ints, SparseQ]],
        scores: mx.array,
        finish: Callable[[Floats], Floats] | None,
    ) -> None:
        """`draw`: `draw_tokens` without its last argument."""
        super().__init__(scores, finish)
        self._draw, self._by_numpy = draw, True

    def q(self, row: int) -> SparseQ:
        """Returns what a row's best token was drawn from, in one row. Waits."""
        self.best()
        return self._q.part(row, row + 1)

    def _choose(self, _: Any, scores: Floats) -> Ints:
        chosen, self._q = self._draw(scores)
        return chosen


def draw_tokens(draws: Draws, seeds: Sequence[int], positions: Sequence[int], scores: Floats) -> tuple[Ints, SparseQ]:
    """Draws a token for each row of `scores` [R, V], log p up to a constant; returns them [R], and their q.

    `seeds`: one for each row, derived from its fork; `positions`: those of the drawn tokens.
    """
    ids = np.stack([best_tokens(row, draws.width) for row in scores]).astype(np.int32)
    weights = np.take_along_axis(scores, ids, -1)
    if draws.saguaro < 1:
        least = np.sort(weights, axis=-1)[:, -min(draws.cached, ids.shape[1])][:, None]
        weights = np.where(weights >= least, weights + np.float32(math.log(draws.saguaro)), weights)
    shares = np.exp(weights - weights.max(axis=-1, keepdims=True))
    best = (weights + gumbel_at(seeds, positions, ids)).argmax(axis=-1)[:, None]
    return np.take_along_axis(ids, best, -1)[:, 0], SparseQ(ids, shares / shares.sum(axis=-1, keepdims=True))
