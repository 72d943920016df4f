"""Sampling parameters of every API as one record.

Omitted values come from the model's generation_config.json, or else are Outrider's defaults.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.protocol.sampling import MAX_SEED, Grammar, SamplingParams
from outrider.server.model.served import ServedModel
from outrider.server.problems import Refused
from outrider.server.schemas import Generation, Sampling

SEEDS = 2**32
UNBOUNDED = 2**31 - 1
_FIELDS = (
    *("top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("repetition_context_size", "presence_context_size", "frequency_context_size"),
)
"""Fields of SamplingParams that a request may have under the same names."""


def seed_of(seed: int, index: int) -> int:
    """Derives a choice's seed from the request's seed, which choice 0 has, and the choice's index."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED


def sampling_params(
    model: ServedModel,
    asked: Generation,
    max_tokens: int,
    stop: str | Sequence[str] | None,
    grammar: Grammar | None = None,
    logprobs: int | None = None,
) -> SamplingParams:
    """Returns the parameters of a request, with a seed.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = {"temp": asked.temperature, **{name: getattr(asked, name, None) for name in _FIELDS}}
    fields: dict[str, Any] = {**model.defaults, **{name: value for name, value in given.items() if value is not None}}
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    fields.setdefault("seed", secrets.randbelow(SEEDS))
    fields |= {"max_tokens": max_tokens, "grammar": grammar, "logprobs": logprobs}
    fields["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if isinstance(asked, Sampling):
        fields["logit_bias"] = _bias(asked.logit_bias)
    return SamplingParams(**fields)


def _bias(given: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    wrong = ", ".join(repr(key[:40]) for key in given or {} if not (key.isascii() and key.isdigit()))
    if wrong:
        raise Refused(f"logit_bias: {wrong[:200]} is not a token id; expected whole numbers as strings", "logit_bias")
    return tuple((int(token), bias) for token, bias in (given or {}).items())


def include_usage_of(asked: Sampling) -> bool:
    """Raises Refused for stream_options without a stream."""
    if asked.stream_options is None:
        return False
    if not asked.stream:
        raise Refused("stream_options needs stream: true", "stream_options")
    return bool(asked.stream_options.include_usage)
