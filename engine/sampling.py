"""The sampling contract: `Sampler` turns logits into log-probabilities and adds the request's noise.

Both workers choose a token as the argmax of `Sampler.scores`, so verification is equality. The steps and their order
are mlx-lm's (penalties and bias, log-softmax, top-p, min-p, top-k, temperature); a grammar excludes tokens before the
log-softmax. With a temperature all steps are in float32, whatever the format of the logits: half precision's steps are
as large as the noise (`engine.noise`) that decides. Greedy choices are made in the logits' own format and bit-identical
with `mlx_lm.generate`. Knows nothing of models, caches or the origin of a row of logits.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from outrider.engine.noise import MAX_NOISE, MIN_NOISE, gumbel, gumbel_of, hash_tokens, noise_keys
from outrider.grammar.constraint import Constraint, TokenBitmask
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams

History = mx.array | Sequence[int]
"""The tokens before a row's own choice: a sequence of ints, or a 1-axis integer array that may be lazy."""

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]
_ROUNDING_ERROR, _RELATIVE_ERROR = 1e-4, 2e-6  # bounds of the rounding errors of scores: absolute, and relative
_PROBABILITY_SUM_ERROR = 2e-3  # the error of a sum of a vocabulary's probabilities in float32
_NOISE_BLOCK_POSITIONS, _MAX_KEPT_NOISE = 8, 32  # positions whose noise is computed at a time (on the CPU: 1), and kept
_PARTS = 64


def mask_logits(logits: mx.array, words: TokenBitmask) -> mx.array:
    """Returns logits [R, V] with -inf where the bit in `words` [R, W] is 0, or `words` are too short. Lazy."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return mx.where(mx.array(bits.view(np.bool_)), logits, mx.array(-mx.inf, logits.dtype))


class Sampler:
    """Computes the scores of one request: warped logits plus Gumbel noise of the request's seed.

    With `normalised` False the log-softmax is left out if no filter needs it: each row of scores then differs from the
    contract's by a constant (and by rounding), which changes no argmax and no gap. A worker makes all its choices in
    one way.

    For residual sampling the scores have no noise: `engine.residual` draws, and a drafter must not know the target's
    noise.
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
            params: `seed` must be set if `temp` is above 0.
            vocab_size: the width of the logits' rows; the noise of a token does not depend on it.
            constraint: the text's grammar, if it has one.

        Raises:
            InvalidRequest: there is a temperature, but no seed.
        """
        if params.temp > 0 and params.seed is None:
            raise InvalidRequest("seed is None; expected a number, since temp is above 0: draw one before sampling")
        self.params = params
        self.vocab_size = vocab_size
        self.constraint = constraint
        self._normalised = normalised or (params.temp > 0 and (params.top_p < 1 or params.min_p > 0))
        self._noise_seed = params.seed or 0
        # The bits are the same; on the CPU numpy is several times faster.
        self._xp: Any = np if mx.default_device().type == mx.cpu else mx
        self._noise: dict[int, Any] = {}  # by position
        alike = replace(
            params,
            seed=None,
            max_tokens=1,
            min_tokens=0,
            stop=(),
            ignore_eos=False,
            grammar=None,
            logprobs=None,
            prompt_logprobs=None,
        )
        self.kind = (type(self), self._normalised, alike, constraint.width if constraint is not None else 0)
        """Samplers of the same kind differ only in their noise and in the tokens that their grammars allow: their rows
        can be scored together."""

    @property
    def has_noise(self) -> bool:
        """True if `scores` include noise."""
        return self.params.temp > 0 and not self.params.is_residual

    @property
    def needs_history(self) -> bool:
        """True if `scores` needs histories; with a grammar their tokens must be known."""
        return self.params.has_penalties or self.constraint is not None

    @property
    def filters(self) -> bool:
        """True if `scores` excludes tokens by top-p, min-p or top-k."""
        params = self.params
        return params.temp > 0 and (params.top_p < 1 or params.min_p > 0 or params.top_k > 0)

    @property
    def reach(self) -> int:
        """The number of preceding tokens that a choice depends on other than through the model."""
        return _reach(self.params) if self.constraint is None else sys.maxsize

    def scores(
        self, logits: mx.array, positions: Sequence[int], histories: Sequence[History] | None = None
    ) -> mx.array:
        """Returns scores [R, V] for logits [R, V]; their argmax are the tokens at `positions`. Lazy.

        Args:
            logits: one row per token to choose.
            positions: the absolute position of the token that each row chooses.
            histories: committed text plus chain prefix of each row; used only if `needs_history`.
        """
        own = [SamplingMetadata(self, positions, histories)]
        return compute_scores(own, apply_penalties(own, logits))

    def penalise(self, logits: mx.array, histories: Sequence[History] | None = None) -> mx.array:
        """Applies penalties, bias and grammar to rows of logits of this sampler; see `apply_penalties`."""
        return apply_penalties([SamplingMetadata(self, (), histories)], logits)

    def filtered(self, logits: mx.array) -> mx.array:
        """Returns the scores, without noise, of logits [R, V] from `penalise`. Lazy.

        With a temperature they are in float32, and normalised before the filters. Excluded tokens are -inf.
        """
        if self._normalised:
            logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return _apply_filters(logits, self.params)

    def choose(self, logits: Floats, positions: Sequence[int]) -> list[int] | None:
        """Returns the argmax of `scores` for each row of float32 logits [R, V] from `penalise`, by numpy alone.

        Noise is computed only for tokens that could be the best. Returns None if only the exact steps can decide:
        scores are not finite, two tokens are closer than rounding, or rounding decides whether a filter keeps a token.
        """
        best = logits.max(axis=-1, keepdims=True)
        if not np.isfinite(best).all():
            return None
        if not self.has_noise:  # nor a temperature: a target's sampler has both or none
            return _unambiguous_argmax(logits, best)
        chosen = [self._choose_row(row, position) for row, position in zip(logits, positions, strict=True)]
        return None if None in chosen else cast("list[int]", chosen)

    def _choose_row(self, logits: Floats, position: int) -> int | None:
        """Returns the choice of one row; None if only the exact steps can decide, as for `choose`."""
        scaled = logits * np.float32(1.0 / self.params.temp)
        best, low, high = scaled.argmax(), -math.inf, -math.inf
        if self.filters:
            low, high = filter_bounds(
                logits,
                self.params,
                _ROUNDING_ERROR + _RELATIVE_ERROR * abs(float(logits[best])),
                _PROBABILITY_SUM_ERROR,
            )
        largest = abs(float(scaled[best]))
        few, scores = self._contenders(
            scaled, best, low / self.params.temp - _ROUNDING_ERROR - _RELATIVE_ERROR * largest, position
        )
        scores = np.where(logits[few] < low, -np.inf, scores)
        chosen = _unambiguous_argmax(scores[None], scores.max(keepdims=True)[None], largest)
        return int(few[chosen[0]]) if chosen is not None and not logits[few[chosen[0]]] <= high else None

    def _contenders(self, scaled: Floats, best: np.intp, floor: float, position: int) -> tuple[Ints, Floats]:
        """Returns the tokens with logits from `floor` on whose scores may be the best or nearly so, and their scores.

        They are compared with the likeliest token, `best`. A token that lacks d needs G >= d, so -log u <= exp(-d). As
        -log u >= 1 - u, comparing that first leaves a few tokens, and no logarithms of the others.
        """
        tokens = np.flatnonzero(scaled >= max(float(scaled[best]) + MIN_NOISE - MAX_NOISE, floor))
        drawn = hash_tokens(np, tokens.astype(np.uint32), *noise_keys(self._noise_seed, [position]))[0]
        own = (int(drawn[np.searchsorted(tokens, best)]) + 0.5) * 2.0**-24
        score = float(scaled[best]) - math.log(-math.log(own))
        score -= 2 * (_ROUNDING_ERROR + _RELATIVE_ERROR * (abs(score) + MAX_NOISE))
        left = ((2**24 - drawn).astype(np.float32) - 0.5) * 2.0**-24
        may = left <= np.exp(np.minimum(scaled[tokens] - score, 0))
        return tokens[may], scaled[tokens[may]] + gumbel_of(np, drawn[may])

    def noise_at(self, position: int) -> Any:
        """Returns the noise at a position, float32 [V]: on the CPU a numpy array. Keeps the latest noise."""
        if position not in self._noise:
            count = 1 if self._xp is np else _NOISE_BLOCK_POSITIONS
            first = position // count * count
            for old in sorted(self._noise)[: max(len(self._noise) + count - _MAX_KEPT_NOISE, 0)]:
                del self._noise[old]
            block = range(first, first + count)
            self._noise.update(zip(block, gumbel(self._xp, self._noise_seed, block, self.vocab_size), strict=True))
        return self._noise[position]


def _unambiguous_argmax(scores: Floats, best: Floats, largest: float = 0.0) -> list[int] | None:
    """Returns the column of each row's best score; None if a second score of a row is equal up to rounding."""
    near = best - (_ROUNDING_ERROR + _RELATIVE_ERROR * np.maximum(abs(best), largest))
    if (np.count_nonzero(scores >= near, axis=-1) > 1).any():
        return None
    return cast("list[int]", scores.argmax(axis=-1).tolist())


def filter_bounds(
    logits: Floats, params: SamplingParams, error: float = 0.0, share: float = 0.0
) -> tuple[float, float]:
    """Returns two bounds for the filters of a row of logits [V]: tokens below the first are all excluded, tokens above
    the second are all kept. Without errors exactly the tokens from the first bound on are kept.

    `error`: the largest error of a logit, relative to others; `share`: the largest further error of a probability sum.
    """
    best = logits.max()
    low = high = float(best) + math.log(params.min_p) if params.min_p > 0 else -math.inf
    if 0 < params.top_k < len(logits):
        last, behind = logits[best_tokens(logits, params.top_k + 1)[-2:]]
        low, high = max(low, last), max(high, behind)
    if 0 < params.top_p < 1:
        odds = math.log(params.top_p / (1 - params.top_p))
        most, least = (1 / (1 + math.exp(-odds - by)) + math.copysign(share, by) for by in (error, -error))
        mass = np.exp(logits - best)
        total = float(mass.sum())
        deepest = most if most < 1 else least  # if rounding may keep all tokens, only the second border matters
        # All tokens below this together have a mass of less than 1 - `deepest`, so they can't belong to the nucleus.
        falling = np.sort(logits[mass >= (1 - deepest) * total / len(logits)])[::-1]
        shares = np.exp(falling - best, dtype=np.float64)
        above = (np.cumsum(shares) - shares) / total  # a token passes if the mass above it is less than top-p
        passing, surely = (int((above < border).sum()) for border in (most, least))
        low = max(low, falling[max(passing, 1) - 1] if most < 1 else -math.inf)
        high = max(high, falling[min(surely, len(falling) - 1)])
    return low - error, high + error


def best_tokens(scores: Floats, count: int) -> Ints:
    """Returns the `count` best tokens of one row of scores [V], best first, lower tokens first if equal: [count].

    numpy's argpartition takes 0.5 ms for 49,152 scores, and 9 ms if most of them are -inf; this takes 0.07 ms.
    """
    if count == 2 < len(scores):
        return _best_two(scores)
    count, columns = min(count, len(scores)), len(scores) // _PARTS
    maxima = scores[: _PARTS * columns].reshape(_PARTS, columns).max(axis=0) if columns >= count else scores
    floor = np.partition(maxima, -count)[-count]
    above = np.flatnonzero(scores > floor)  # no more than _PARTS x count
    best: Ints = above[np.argsort(-scores[above], kind="stable")[:count]]
    level = np.flatnonzero(scores == floor)[: count - len(best)]
    return np.concatenate([best, level])


def _best_two(scores: Floats) -> Ints:
    """Returns the two best tokens as `best_tokens` does, in a third of the time."""
    best = int(scores.argmax())
    parts = ((0, scores[:best]), (best + 1, scores[best + 1 :]))
    others = [begin + int(part.argmax()) for begin, part in parts if len(part)]
    return np.array([best, max(others, key=lambda token: scores[token])])


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How rows of logits choose tokens: at `positions`, by `sampler`, after `histories` if it needs them."""

    sampler: Sampler
    positions: Sequence[int]
    histories: Sequence[History] | None = None


def apply_penalties(metadata: Sequence[SamplingMetadata], logits: mx.array) -> mx.array:
    """Returns logits [R, V] after penalties, bias and grammar, the first step of the scores.

    The rows of all `metadata` follow one another; their samplers are of one kind. With a temperature the result is in
    float32. Lazy, except for the grammar.
    """
    sampler, histories = metadata[0].sampler, None
    if sampler.needs_history and metadata[0].histories is not None:
        histories = [history for rows in metadata for history in rows.histories or ()]
    result, words = _apply_processors(logits, histories, sampler.params), _allowed_words(metadata)
    return result if words is None else mask_logits(result, words)


def compute_scores(metadata: Sequence[SamplingMetadata], logits: mx.array) -> mx.array:
    """Returns the scores (`Sampler.scores`) of logits from `apply_penalties`. Lazy."""
    sampler = metadata[0].sampler
    scores = sampler.filtered(logits)
    if not sampler.has_noise:
        return scores
    noise = sampler._xp.stack([own.sampler.noise_at(place) for own in metadata for place in own.positions])
    return scores + (noise if isinstance(noise, mx.array) else mx.array(noise))


def _allowed_words(metadata: Sequence[SamplingMetadata]) -> TokenBitmask | None:
    """Returns what grammars of samplers of one kind allow after their histories, row by row; None: no grammar."""
    words = []
    for rows in metadata:
        if rows.sampler.constraint is not None:
            if rows.histories is None:
                raise InvalidRequest("a grammar needs the tokens before each row; got none")
            words.append(rows.sampler.constraint.allowed(cast("Sequence[Sequence[int]]", rows.histories)))
    return np.concatenate(words) if words else None


def _apply_processors(logits: mx.array, histories: Sequence[History] | None, params: SamplingParams) -> mx.array:
    if params.temp > 0:
        logits = logits.astype(mx.float32)
    processors = _make_processors(params, logits.shape[-1])
    if not processors:
        return logits
    if histories is None:
        if params.has_penalties:
            raise InvalidRequest("penalties need the tokens before each row; got none")
        histories = [[]] * logits.shape[0]
    rows = []
    for row, history in enumerate(histories):
        tokens = _penalty_tokens(history, params, logits.shape[-1])
        processed = logits[row : row + 1]
        for processor in processors:
            processed = processor(tokens, processed)
        rows.append(processed)
    return mx.concatenate(rows)


def _make_processors(params: SamplingParams, vocab_size: int) -> list[Any]:
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


def _penalty_tokens(history: History, params: SamplingParams, vocab_size: int) -> mx.array:
    """Returns the latest tokens, which penalties depend on, without known ids beyond a narrower vocabulary."""
    tail = history[-_reach(params) :]
    if isinstance(tail, mx.array):
        return tail
    return mx.array([token for token in tail if token < vocab_size], dtype=mx.int32)


def _reach(params: SamplingParams) -> int:
    return max(params.repetition_context_size, params.presence_context_size, params.frequency_context_size)


def _apply_filters(logprobs: mx.array, params: SamplingParams) -> mx.array:
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
    """Disables compilation: mlx-lm compiles its filters for each new top-p, which takes seconds of g++ on a CPU."""
    mx.disable_compile()
    try:
        yield
    finally:
        if "MLX_DISABLE_COMPILE" not in os.environ:
            mx.enable_compile()
