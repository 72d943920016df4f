"""`python -m outrider.target_worker.certificate`: replays an output and says which tokens are the target's own.

Reads one JSON object {model, tokens, generated, sampling} from stdin, writes JSON lines: {stage} and {position, of} as
it goes, then the report, or {error, kind}. Each token is chosen by a single-step forward over all before it, as plain
decoding does it. A token that differs by less than rounding explains is a tie, any other a mismatch. Knows one text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from outrider.engine.loading import LoadedModel, load
from outrider.engine.sampling import Sampler, warp
from outrider.engine.slots import Slot
from outrider.protocol.certificate import Difference, Report
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.sampling import SamplingParams

PROGRESS_EVERY = 16
# What two correct forwards may differ by in a score: chunk and step kernels round differently, each in its own format.
TOLERANCES = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 1.5e-1}


@dataclass(frozen=True, slots=True)
class Claim:
    """`generated` is said to be what `model` samples after `tokens` with `sampling`."""

    model: str
    tokens: tuple[int, ...]
    generated: tuple[int, ...]
    sampling: SamplingParams


def certify(model: LoadedModel, claim: Claim, progress: Callable[[int, int], None] | None = None) -> Report:
    """Replays the claim. `progress(done, total)` counts generated tokens.

    Raises:
        InvalidRequest: the claim has no tokens, or tokens the model doesn't have.
    """
    if claim.sampling.is_residual:
        raise InvalidRequest("residual sampling may give another text each time; expected coupled sampling")
    slot = Slot(model, claim.tokens, claim.sampling)
    if any(not 0 <= token < model.vocab_size for token in claim.generated):
        raise InvalidRequest(f"a generated token is outside 0..{model.vocab_size - 1}, the model's vocabulary")
    slot.feed_all_but(1)
    ties: list[Difference] = []
    mismatches: list[Difference] = []
    tolerance = TOLERANCES[mx.float32]
    for done, token in enumerate(claim.generated, start=1):
        logits = slot.forward(mx.array(slot.unfed))[-1:]
        tolerance = TOLERANCES.get(logits.dtype, tolerance)
        difference, tied = _judge(logits, slot, token, tolerance)
        if difference is not None:
            (ties if tied else mismatches).append(difference)
        slot.tokens.append(token)
        if progress is not None and done % PROGRESS_EVERY == 0:
            progress(done, len(claim.generated))
    identical = len(claim.generated) - len(ties) - len(mismatches)
    return Report(len(claim.generated), identical, tuple(ties), tuple(mismatches), tolerance)


def _judge(logits: mx.array, slot: Slot, token: int, tolerance: float) -> tuple[Difference | None, bool]:
    """The difference at this position, if any, and whether rounding explains it."""
    margin, expected = _margin(logits, slot, slot.sampler, token)
    if expected == token:
        return None, False
    nearest = margin
    for params in _moved_borders(slot, logits, tolerance):
        nearest = min(nearest, _margin(logits, slot, Sampler(params, slot.sampler.vocab_size), token)[0])
    told = nearest if math.isfinite(nearest) else None
    return Difference(len(slot.tokens), token, expected, told), nearest < tolerance


def _margin(logits: mx.array, slot: Slot, sampler: Sampler, token: int) -> tuple[float, int]:
    """How far `token` lies below the best score, and the best token. Infinite for a token that was filtered out."""
    history = [slot.tokens] if sampler.needs_history else None
    scores = sampler.scores(logits, [len(slot.tokens)], history)[0].astype(mx.float32)
    best = int(_number(mx.argmax(scores)))
    return _number(scores[best] - scores[token]), best


def _number(scalar: mx.array) -> float:
    value: Any = scalar.item()
    return float(value)


def _moved_borders(slot: Slot, logits: mx.array, tolerance: float) -> Iterator[SamplingParams]:
    """The request's parameters with a border of its filters moved by what rounding may move it."""
    params = slot.sampler.params
    if params.temp == 0:
        return
    if 0 < params.top_p < 1:
        yield replace(params, top_p=min(params.top_p + tolerance, 1.0))
        yield replace(params, top_p=max(params.top_p - tolerance, 1e-9))  # 0 would turn the filter off
    if params.min_p > 0:
        yield replace(params, min_p=params.min_p * math.exp(-tolerance))
        yield replace(params, min_p=min(params.min_p * math.exp(tolerance), 1.0))
    if 0 < params.top_k < logits.shape[-1]:
        plain = replace(params, temp=1.0, top_p=1.0, min_p=0.0, top_k=0)
        falling = -mx.sort(-warp(logits, [slot.tokens], plain)[0].astype(mx.float32))
        if _number(falling[params.top_k - 1] - falling[params.top_k]) < tolerance:
            yield replace(params, top_k=params.top_k + 1)
            yield replace(params, top_k=max(params.top_k - 1, 1))


def _read_claim(text: str) -> Claim:
    """Raises InvalidRequest for anything but a claim."""
    try:
        fields = json.loads(text)
        sampling = dict(fields["sampling"])
        sampling["stop"] = tuple(sampling.get("stop", ()))
        sampling["logit_bias"] = tuple(tuple(pair) for pair in sampling.get("logit_bias", ()))
        return Claim(
            model=str(fields["model"]),
            tokens=_whole(fields["tokens"]),
            generated=_whole(fields["generated"]),
            sampling=SamplingParams(**sampling),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            f"the claim can't be read ({error!r}); expected a JSON object with model, tokens, generated and sampling"
        ) from None


def _whole(tokens: Sequence[object]) -> tuple[int, ...]:
    if any(type(token) is not int for token in tokens):
        raise ValueError("tokens must be whole numbers")
    return tuple(token for token in tokens if isinstance(token, int))


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    try:
        claim = _read_claim(sys.stdin.read())
        model = load(claim.model, progress=lambda stage: _say({"stage": stage}))
        report = certify(model, claim, lambda done, total: _say({"position": done, "of": total}))
    except OutriderError as error:
        _say({"error": str(error), "kind": type(error).__name__})
        return error.exit_code
    _say(dataclasses.asdict(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
