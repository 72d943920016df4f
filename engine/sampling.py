"""The sampling contract: `warp` makes log-probabilities of logits, `Sampler` adds the request's noise.

Both workers choose a token as the argmax of `Sampler.scores`, so verification is equality. The order of steps and the
steps themselves are mlx-lm's (penalties and bias, log-softmax, top-p, min-p, top-k, temperature); a grammar rules out
tokens before the log-softmax. With a temperature all of it is in float32, whatever the logits are in: half precision's
steps are as large as the noise that decides. Greedy choices are made in the logits' own format and bit-identical with
`mlx_lm.generate`. Knows nothing of models, caches or where a logit row comes from.

`filtered` applies the same filters by numpy, for a drafter's scores on a CPU: MLX sorts a whole vocabulary for top-p, 4
ms for 12 rows of 4,096 there, 0.2 ms here. The kept tokens are the same up to rounding at a border, where a drafter may
differ because only the target's choice counts. `RowLogprobs` are the log-probabilities that a request asks for, before
temperature and filters.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from outrider.engine.noise import GREATEST, gumbel, gumbel_at, gumbel_numpy
from outrider.engine.positions import Ints
from outrider.grammar.constraint import Constraint, Words
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import NEVER, Logprobs


def masked(logits: mx.array, words: Words) -> mx.array:
    """Logits [R, V] with -inf where `words` [R, W] have no bit, or are too short to have one. Lazy."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return mx.where(mx.array(bits.view(np.bool_)), logits, mx.array(-mx.inf, logits.dtype))


History = mx.array | Sequence[int]
"""The tokens before a row's own choice: a sequence of ints, or a 1-axis integer array that may be lazy."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
_ROUNDING, _ULPS = 1e-4, 2e-6
_MASS = 2e-3  # by which a sum of a vocabulary's probabilities in float32 may be wrong
"""What the steps of float32 between logits and scores may add up to: at least, and of the numbers' size."""
_BLOCK = 8  # positions whose noise is made at once
_BLOCKS_KEPT = 4


def warp(logits: mx.array, histories: Sequence[History] | None, params: SamplingParams) -> mx.array:
    """Log-probabilities after penalties, bias, filters and temperature; tokens filtered out are -inf.

    Args:
        logits: [R, V], any float dtype.
        histories: committed text plus chain prefix, one a row; needed only when `params.has_penalties`.
        params: temperature 0 means no filters and no temperature, as in mlx-lm.

    Returns:
        [R, V]; with a temperature float32, and normalised only before the filters; without one in `logits`' format.
    """
    logits = _penalise(logits, histories, params)
    return _filter(logits - mx.logsumexp(logits, axis=-1, keepdims=True), params)


class Sampler:
    """Scores for one request: `warp` plus Gumbel noise of the request's seed.

    With `normalised` False the log-softmax is left out where no filter needs it: scores then differ from the contract's
    by a constant a row (and by rounding), which no argmax and no gap notices. A side makes all its choices in one way.

    For residual sampling there is no noise in the scores: a drafter must not know the target's, which is
    `engine.residual`'s, and draws by its own (`engine.residual`).
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        *,
        normalised: bool = True,
        constraint: Constraint | None = None,
    ) -> None:
        """
        Args:
            params: `seed` must be set when `temp` is above 0.
            vocab_size: width of the logit rows; the noise of a token does not depend on it.
            constraint: what the text's grammar allows, if it has one.

        Raises:
            InvalidRequest: there is a temperature and no seed.
        """
        if params.temp > 0 and params.seed is None:
            raise InvalidRequest("seed is None; expected a number once temp is above 0: draw one before sampling")
        self.params = params
        self.vocab_size = vocab_size
        self.constraint = constraint
        self._normalised = normalised or (params.temp > 0 and (params.top_p < 1 or params.min_p > 0))
        self._noise_seed = params.seed or 0
        # The same bits either way; on the CPU numpy is several times quicker.
        self._xp: Any = np if mx.default_device().type == mx.cpu else mx
        self._blocks: dict[int, Any] = {}
        alike = replace(
            params, seed=None, max_tokens=1, min_tokens=0, stop=(), ignore_eos=False, grammar=None, logprobs=None
        )
        self.kind = (type(self), self._normalised, alike, constraint.width if constraint is not None else 0)
        """Samplers of the same kind differ in nothing but their noise and in what their grammars allow: their rows can
        be scored together."""

    @property
    def noisy(self) -> bool:
        """True when `scores` has noise in it."""
        return self.params.temp > 0 and not self.params.is_residual

    @property
    def needs_history(self) -> bool:
        """True when `scores` needs histories, of known tokens if there is a grammar."""
        return self.params.has_penalties or self.constraint is not None

    @property
    def filters(self) -> bool:
        """True when `scores` rules some tokens out."""
        params = self.params
        return params.temp > 0 and (params.top_p < 1 or params.min_p > 0 or params.top_k > 0)

    @property
    def reach(self) -> int:
        """How many tokens before it a choice can depend on, apart from through the model."""
        return _reach(self.params) if self.constraint is None else sys.maxsize

    def scores(
        self, logits: mx.array, positions: Sequence[int], histories: Sequence[History] | None = None
    ) -> mx.array:
        """Scores whose argmax are the tokens at `positions`: [R, V] for logits [R, V]. Lazy.

        Args:
            logits: one row a token to choose.
            positions: absolute position of the token each row chooses.
            histories: see `warp`.
        """
        scores = self.warped(logits, histories)
        return scores + self.noise(positions) if self.noisy else scores

    def warped(
        self, logits: mx.array, histories: Sequence[History] | None = None, words: Words | None = None
    ) -> mx.array:
        """`scores` without the noise; `words` as in `penalise`. Lazy."""
        return self.filtered(self.penalise(logits, histories, words))

    def filtered(self, logits: mx.array) -> mx.array:
        """`warped` of logits from `penalise`. Lazy."""
        if self._normalised:
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return _filter(logits, self.params)

    def penalise(
        self, logits: mx.array, histories: Sequence[History] | None = None, words: Words | None = None
    ) -> mx.array:
        """`logits` after penalties, bias and grammar, the first step of `scores`; float32 if there is a temperature.

        `words`: what grammars allow, for rows of several samplers (`joint_words`). Lazy except for that.
        """
        penalised = _penalise(logits, histories, self.params)
        if words is None:
            words = joint_words([(self, histories)])
        return penalised if words is None else masked(penalised, words)

    def choose(self, penalised: Floats, positions: Sequence[int]) -> list[int] | None:
        """The argmax of `scores` for each row of float32 logits [R, V] from `penalise`, by numpy alone.

        Noise is computed only where it can decide: at tokens whose score could be the best with the greatest noise.
        None where the exact steps have to decide: scores that are no numbers, two tokens closer than rounding, or a
        token that rounding may keep or filter out.
        """
        best = penalised.max(axis=-1, keepdims=True)
        if not np.isfinite(best).all():
            return None
        if not self.noisy and not self.filters:
            return _only_bests(penalised, best)
        scaled = penalised * np.float32(1.0 / self.params.temp)
        seeds = [self._noise_seed] * len(positions)
        floor = best * np.float32(1.0 / self.params.temp)
        if self.noisy:
            likeliest = scaled.argmax(axis=-1)[:, None]
            floor = np.take_along_axis(scaled, likeliest, -1) + gumbel_at(np, seeds, positions, likeliest) - GREATEST
        rows, tokens = np.nonzero(scaled >= floor)
        counts = np.bincount(rows, minlength=len(positions))
        places = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        few = np.zeros((len(positions), counts.max()), np.int64)
        scores = np.full(few.shape, -np.inf, np.float32)
        few[rows, places], scores[rows, places] = tokens, scaled[rows, tokens]
        if self.noisy:
            scores += gumbel_at(np, seeds, positions, few)
        unsure = np.zeros(few.shape, bool)
        if self.filters:
            for row, count in enumerate(counts):
                lost, unsure[row, :count] = _filtered_out(penalised[row], few[row, :count], self.params)
                scores[row, :count][lost] = -np.inf
        chosen = _only_bests(scores, scores.max(axis=-1, keepdims=True), float(abs(best).max()) / self.params.temp)
        every = np.arange(len(positions))
        if chosen is None or unsure[every, chosen].any():
            return None
        return cast("list[int]", few[every, chosen].tolist())

    def noise(self, positions: Sequence[int]) -> mx.array:
        """G at these positions, float32 [P, V]; made once a position and kept a while."""
        return joint_noise([(self, positions)])

    def _noise_at_all(self, positions: Sequence[int]) -> Any:
        """`noise` as it was made: a numpy array on the CPU."""
        xp, (blocks, index) = self._xp, _blocks_of(positions)
        rows = [self._block(block) for block in blocks]
        noise = rows[0] if len(rows) == 1 else xp.concatenate(rows)
        if len(index) == 1:
            return noise[index[0] : index[0] + 1]
        return xp.take(noise, xp.array(index), axis=0)

    def add_noise(self, scores: np.ndarray[Any, np.dtype[np.float32]], positions: Sequence[int]) -> None:
        """Adds `noise` to scores [P, V] in place, by numpy: row by row, for rows that are gathered are copied first."""
        blocks = {block: np.array(self._block(block), copy=False) for block in _blocks_of(positions)[0]}
        for row, position in zip(scores, positions, strict=True):
            row += blocks[position // _BLOCK][position % _BLOCK]

    def _block(self, block: int) -> Any:
        if block not in self._blocks:
            if len(self._blocks) >= _BLOCKS_KEPT:
                self._blocks.pop(min(self._blocks))
            make = gumbel_numpy if self._xp is np else gumbel
            positions = range(block * _BLOCK, (block + 1) * _BLOCK)
            self._blocks[block] = make(self._noise_seed, positions, self.vocab_size)
        return self._blocks[block]


def _only_bests(scores: Floats, best: Floats, largest: float = 0.0) -> list[int] | None:
    """The place of each row's best score; None where a second score is equal up to rounding."""
    near = best - (_ROUNDING + _ULPS * np.maximum(abs(best), largest))
    if (np.count_nonzero(scores >= near, axis=-1) > 1).any():
        return None
    return cast("list[int]", scores.argmax(axis=-1).tolist())


def _filtered_out(
    logits: Floats, tokens: Ints, params: SamplingParams
) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], np.ndarray[Any, np.dtype[np.bool_]]]:
    """Which of a row's tokens [N] filters surely remove, and of which rounding decides. `logits`: the row [V]."""
    own, best = logits[tokens], logits.max()
    slack = _ROUNDING + _ULPS * abs(best)
    lowest = best + math.log(params.min_p) if params.min_p > 0 else -np.inf
    if 0 < params.top_k < len(logits):
        lowest = max(lowest, logits[best_tokens(logits, params.top_k)[-1]])
    lost, unsure = own < lowest - slack, abs(own - lowest) <= slack
    if 0 < params.top_p < 1:
        ranked = np.sort(logits[logits >= own.min()])[::-1]
        mass = np.cumsum(np.exp(ranked - best), dtype=np.float64) / np.exp(logits - best).sum()
        mass = np.concatenate([[0.0], mass])
        above = mass[np.searchsorted(-ranked, -own, side="left")]  # the mass of all better tokens
        beside = mass[np.searchsorted(-ranked, -own, side="right") - 1]  # and of all but one that are as good
        lost |= above > params.top_p + _MASS
        unsure |= (beside > params.top_p - _MASS) & ~lost
    return lost, unsure & ~lost


_PARTS = 64


def best_tokens(scores: Floats, count: int) -> Ints:
    """The `count` best tokens of one row of scores [V], best first, of equals the lower token first: [count].

    numpy's argpartition takes 0.5 ms for 49,152 scores and 9 ms where most of them are -inf; this takes 0.07 ms.
    """
    columns = len(scores) // _PARTS
    if columns < count:
        return np.argsort(-scores, kind="stable")[:count]
    maxima = scores[: _PARTS * columns].reshape(_PARTS, columns).max(axis=0)
    floor = np.partition(maxima, -count)[-count]
    above = np.flatnonzero(scores > floor)  # no more than _PARTS x count
    best: Ints = above[np.argsort(-scores[above], kind="stable")[:count]]
    level = np.flatnonzero(scores == floor)[: count - len(best)]
    return np.concatenate([best, level])


def joint_words(own: Sequence[tuple[Sampler, Sequence[History] | None]]) -> Words | None:
    """What the grammars of samplers of one kind allow after their histories, row after row; None: no grammar."""
    found = []
    for sampler, histories in own:
        if sampler.constraint is not None:
            if histories is None:
                raise InvalidRequest("a grammar needs the tokens before each row; got none")
            found.append(sampler.constraint.allowed(cast("Sequence[Sequence[int]]", histories)))
    return np.concatenate(found) if found else None


def joint_noise(wanted: Sequence[tuple[Sampler, Sequence[int]]]) -> mx.array:
    """The noise of several samplers, each at its positions, one after the other: float32 [P, V]."""
    parts = [sampler._noise_at_all(positions) for sampler, positions in wanted]
    joint = parts[0] if len(parts) == 1 else wanted[0][0]._xp.concatenate(parts)
    return joint if isinstance(joint, mx.array) else mx.array(joint)


def _blocks_of(positions: Sequence[int]) -> tuple[list[int], list[int]]:
    """The blocks of these positions, and each position's place in the concatenated blocks."""
    blocks = sorted({position // _BLOCK for position in positions})
    return blocks, [blocks.index(position // _BLOCK) * _BLOCK + position % _BLOCK for position in positions]


def _penalise(logits: mx.array, histories: Sequence[History] | None, params: SamplingParams) -> mx.array:
    if params.temp > 0:
        logits = logits.astype(mx.float32)  # nothing, where they are
    processors = _processors(params, logits.shape[-1])
    if not processors:
        return logits
    if histories is None:
        if params.has_penalties:
            raise InvalidRequest("penalties need the tokens before each row; got none")
        histories = [[]] * logits.shape[0]
    rows = []
    for row, history in enumerate(histories):
        tokens = _tail(history, params, logits.shape[-1])
        penalised = logits[row : row + 1]
        for processor in processors:
            penalised = processor(tokens, penalised)
        rows.append(penalised)
    return mx.concatenate(rows)


def _processors(params: SamplingParams, vocab_size: int) -> list[Any]:
    bias = {token: value for token, value in params.logit_bias if token < vocab_size}
    if not bias and not params.has_penalties:
        return []
    processors: list[Any] = make_logits_processors(
        bias or None,
        params.repetition_penalty if params.repetition_penalty != 1.0 else None,
        params.repetition_context_size,
        params.presence_penalty,
        params.presence_context_size,
        params.frequency_penalty,
        params.frequency_context_size,
    )
    return processors


def _tail(history: History, params: SamplingParams, vocab_size: int) -> mx.array:
    """The tokens penalties can see; ids beyond a narrower vocabulary are dropped where they are known."""
    if isinstance(history, mx.array):
        return history[-_reach(params) :]
    tail = list(history[-_reach(params) :])
    if tail and max(tail) >= vocab_size:
        tail = [token for token in tail if token < vocab_size]
    return mx.array(tail, dtype=mx.int32)


def _reach(params: SamplingParams) -> int:
    return max(params.repetition_context_size, params.presence_context_size, params.frequency_context_size)


def _filter(logprobs: mx.array, params: SamplingParams) -> mx.array:
    if params.temp == 0:
        return logprobs
    with _uncompiled():
        if 0 < params.top_p < 1:
            logprobs = apply_top_p(logprobs, params.top_p)
        if params.min_p > 0:
            logprobs = apply_min_p(logprobs, params.min_p)
        if 0 < params.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, params.top_k)
    return logprobs * (1.0 / params.temp)


@contextmanager
def _uncompiled() -> Iterator[None]:
    """mlx-lm compiles its filters for each value of their parameters: seconds of g++ for every new top-p on a CPU."""
    mx.disable_compile()
    try:
        yield
    finally:
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()


class RowLogprobs:
    """Log-probabilities of some rows, on the device: the whole distribution and the likeliest tokens. Lazy."""

    def __init__(self, logits: mx.array, count: int) -> None:
        """`logits` [R, V] after penalties, bias and grammar; `count` likeliest tokens are wanted."""
        logits = logits.astype(mx.float32)
        self._all = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        width = logits.shape[1]
        self._top = mx.argpartition(-self._all, kth=min(count, width - 1), axis=-1)[:, :count] if count else None

    @property
    def pending(self) -> list[mx.array]:
        """What to evaluate so that `of` need not wait."""
        return [self._all] if self._top is None else [self._all, self._top]

    def of(self, tokens: Sequence[int], rows: Sequence[int]) -> Logprobs:
        """The log-probabilities of these rows' tokens, and the likeliest others. Waits."""
        every = np.array(self._all, copy=False)[rows]
        ids = np.asarray(tokens, np.int32)[:, None]
        if self._top is not None:
            top = np.array(self._top)[rows].astype(np.int32)
            order = np.argsort(-np.take_along_axis(every, top, 1), axis=1, kind="stable")
            ids = np.concatenate([ids, np.take_along_axis(top, order, 1)], axis=1)
        return Logprobs(ids, np.maximum(np.take_along_axis(every, ids, 1), np.float32(NEVER)))


def filtered(logits: Floats, params: SamplingParams) -> Floats:
    """Logits [R, V], penalised but not normalised, at temperature above 0: filtered ones -inf, then divided by it."""
    top = logits.max(axis=-1)
    lowest = np.full(len(logits), -np.inf, dtype=np.float32)
    if 0 < params.top_p < 1:
        lowest = _top_p(logits, top, params.top_p)
    if params.min_p > 0:
        lowest = np.maximum(lowest, top + math.log(params.min_p))
    if 0 < params.top_k < logits.shape[1]:
        lowest = np.maximum(lowest, [row[best_tokens(row, params.top_k)[-1]] for row in logits])
    kept: Floats = np.where(logits < lowest[:, None], -np.inf, logits * np.float32(1.0 / params.temp))
    return kept


def _top_p(logits: Floats, top: Floats, p: float) -> Floats:
    """The lowest logit of each row's nucleus: the fewest best tokens whose mass reaches `p`."""
    mass = np.exp(logits - top[:, None])
    total = mass.sum(axis=-1)
    # All tokens below this together weigh less than 1 - p, so they can't belong to the nucleus.
    hopeless = (1.0 - p) * total / logits.shape[1]
    lowest = np.empty_like(top)
    for row in range(len(logits)):
        large = mass[row][mass[row] >= hopeless[row]]
        order = np.sort(large)[::-1]
        above = np.cumsum(order) - order
        last = int(np.searchsorted(above, p * total[row], side="left")) - 1
        lowest[row] = logits[row][mass[row] >= order[last]].min()
    return lowest
