"""`python -m outrider.target_worker.certificate`: replays an output and reports which tokens are the target's own.

Reads a `Claim` as JSON from stdin; writes JSON lines: {stage} and {position, of} as progress, then the report, or
{error, kind}. Each token is chosen by a forward of one token after all earlier ones, as in plain decoding. Knows one
text's tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence

import mlx.core as mx
import msgspec
import numpy as np

from outrider.engine.kv_cache import CacheSlot, SeparateKVCache
from outrider.engine.load_checks import open_kv_cache, probe_abilities
from outrider.engine.loading import LoadedModel, load
from outrider.engine.sampling import Floats, Sampler, filter_bounds
from outrider.grammar.compiler import GrammarCompiler
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.stats import Claim, Difference, Report

# The tolerated error of a difference of two logits: at least this, or one step of the format for each of the two. Sums
# of float32 depend on the order of the BLAS's kernels: 3e-4 was measured with those for AVX2.
MIN_TOLERANCE = {mx.float32: 1e-3, mx.float16: 2e-2, mx.bfloat16: 1.5e-1}
SCORE_ROUNDING_ERROR = 1e-5  # of scores in float32 that include noise up to 16; in logits it counts T times
SUM_ROUNDING_ERROR = 1e-5  # of the sum of probabilities for top-p
TOKENS_PER_PROGRESS = 16


def judge(logits: mx.array, tokens: Sequence[int], sampler: Sampler, token: int) -> Difference | None:
    """Returns how `token` differs from what `sampler` chooses after `tokens` by `logits` [1, V], or None."""
    history = [tokens] if sampler.needs_history else None
    scores, own = sampler.scores(logits, [len(tokens)], history), _only_row(logits)
    expected = int(_only_row(scores).argmax())
    if expected == token:
        return None
    params = sampler.params
    penalty_factor = max(params.repetition_penalty, 1 / params.repetition_penalty)  # may scale a difference
    tolerance = penalty_factor * _tolerance(own, logits.dtype, token, expected) + SCORE_ROUNDING_ERROR * params.temp
    reach = penalty_factor * _tolerance(own, logits.dtype, token, expected, int(own.argmax()))
    warped = _only_row(sampler.penalise(logits.astype(mx.float32), history))
    noise = np.array(sampler.noise_at(len(tokens))) if sampler.has_noise else np.zeros_like(warped)
    noisy_scores = warped + params.temp * noise
    # The score to beat: the best of the tokens that pass the filters wherever rounding puts their borders.
    low, high = filter_bounds(warped, params, reach, SUM_ROUNDING_ERROR) if sampler.filters else (-math.inf, -math.inf)
    certain = warped > high
    certain[np.argmax(warped)] = True
    margin = max(0.0, float(noisy_scores[certain].max() - noisy_scores[token])) if warped[token] >= low else math.inf
    return Difference(len(tokens), token, expected, margin if math.isfinite(margin) else None, tolerance)


def is_tie(difference: Difference) -> bool:
    """Whether rounding explains the difference: logits within the tolerance would have made the token the choice, with
    filters and temperature. Two correct forwards may differ: kernels for several tokens round otherwise than for
    one."""
    return difference.margin is not None and difference.margin <= difference.tolerance


def _tolerance(logits: Floats, dtype: mx.Dtype, *tokens: int) -> float:
    """Returns how much rounding to this format may change the difference of the logits of any two of these tokens. One
    of -inf, of a token that the model excludes, is not rounded."""
    largest = max((abs(float(logits[token])) for token in tokens if math.isfinite(logits[token])), default=0.0)
    step = float(mx.finfo(dtype).eps) * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0
    return max(MIN_TOLERANCE.get(dtype, MIN_TOLERANCE[mx.float32]), 2 * step)


def _only_row(rows: mx.array) -> Floats:
    """Returns the only row, [V]."""
    return np.array(rows.astype(mx.float32))[0]  # type: ignore[no-any-return]


def certify(model: LoadedModel, claim: Claim, progress: Callable[[int, int], None] | None = None) -> Report:
    """Replays the claim. `progress(done, total)` counts generated tokens.

    Raises:
        InvalidRequest: the claim has no tokens, tokens outside the vocabulary, or residual sampling.
    """
    claim.sampling.require_coupled()
    grammar, start, least = claim.sampling.grammar, len(claim.tokens), claim.sampling.min_tokens
    constraint = GrammarCompiler(model.folder).constraint(grammar, claim.ends, start, least)
    if model.cpu is not None:
        kv_cache = open_kv_cache(model)  # the target's own kernels
    else:
        kv_cache = SeparateKVCache(model.model, own_caches=not probe_abilities(model).chains)
    slot = CacheSlot(model, kv_cache, claim.tokens, claim.sampling, constraint)
    if any(not 0 <= token < model.vocab_size for token in claim.generated):
        raise InvalidRequest(f"a generated token is out of range; expected 0 to {model.vocab_size - 1} for this model")
    slot.feed_all_but_last()
    ties, mismatches = list[Difference](), list[Difference]()
    for done, token in enumerate(claim.generated, start=1):
        difference = judge(slot.forward(slot.unfed)[-1:], slot.tokens, slot.sampler, token)
        if difference is not None:
            (ties if is_tie(difference) else mismatches).append(difference)
        slot.tokens.append(token)
        if progress is not None and done % TOKENS_PER_PROGRESS == 0:
            progress(done, len(claim.generated))
    identical = len(claim.generated) - len(ties) - len(mismatches)
    return Report(len(claim.generated), identical, tuple(ties), tuple(mismatches), model.context_length)


def _print(line: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    claim = msgspec.json.decode(sys.stdin.read(), type=Claim)
    try:
        model = load(claim.model, progress=lambda stage: _print({"stage": stage}))
        _print(dataclasses.asdict(certify(model, claim, lambda done, total: _print({"position": done, "of": total}))))
    except OutriderError as error:
        _print({"error": str(error), "kind": type(error).__name__})
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
