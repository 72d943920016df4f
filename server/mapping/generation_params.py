"""Sampling and speculation parameters of every API as one record.

Omitted values come from the model's generation_config.json, or else are Outrider's defaults.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.protocol.sampling import MAX_SEED, Grammar, SamplingParams
from outrider.server.model.served import ServedModel
from outrider.server.problems import Refused
from outrider.server.shapes.base import Sampling, Speculation, Watched

SEEDS = 2**32
UNBOUNDED = 2**31 - 1
_SAME_NAMES = (
    "min_tokens",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "repetition_context_size",
    "presence_context_size",
    "frequency_context_size",
    "ignore_eos",
)


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """`sampling` has a seed. `mode`, `num_draft_tokens`, `branches`, `drafter`: as in `Client.generate`.

    `timeout` is in seconds. `origins`, `rounds` and `ids` (of tokens) request these in the response.
    """

    sampling: SamplingParams
    mode: str = "auto"
    num_draft_tokens: int | None = None
    branches: int | None = None
    timeout: float | None = None
    origins: bool = False
    rounds: bool = False
    drafter: str = ""
    ids: bool = False

    def another(self, index: int) -> GenerationParams:
        """Returns the parameters of choice `index`, which differ in the seed. Choice 0 has the request's seed."""
        if index == 0:
            return self
        return replace(self, sampling=replace(self.sampling, seed=seed_of(self.sampling.seed or 0, index)))


def seed_of(seed: int, index: int) -> int:
    """Derives a choice's seed from the request's seed and the choice's index."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED


def generation_params(
    model: ServedModel, speculation: Speculation | None = None, timeout: float | None = None, **given: Any
) -> GenerationParams:
    """`given` are keywords of SamplingParams; None means omitted.

    Raises:
        InvalidRequest: a value is out of range.
    """
    fields: dict[str, Any] = {**model.defaults, **{name: v for name, v in given.items() if v is not None}}
    if fields.get("top_k") == -1:
        fields["top_k"] = 0
    fields.setdefault("seed", secrets.randbelow(SEEDS))
    wanted = speculation or Speculation()
    return GenerationParams(
        SamplingParams(**fields), wanted.mode, wanted.num_draft_tokens, wanted.branches, timeout, drafter=wanted.drafter
    )


def generation_params_of(
    model: ServedModel, asked: Sampling, max_tokens: int, grammar: Grammar | None, logprobs: int | None
) -> GenerationParams:
    """Returns the parameters of a chat or text completion.

    Raises:
        InvalidRequest: a value is out of range.
    """
    made = generation_params(
        model,
        asked.speculation,
        asked.timeout,
        max_tokens=max_tokens,
        temp=asked.temperature,
        top_k=asked.top_k,
        seed=asked.seed,
        stop=stops(asked.stop),
        logit_bias=_bias(asked.logit_bias),
        grammar=grammar,
        logprobs=logprobs,
        **{name: getattr(asked, name) for name in _SAME_NAMES},
    )
    seen = asked.speculation or Watched()
    return replace(made, origins=seen.origins, rounds=seen.rounds)


def stops(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def room(model: ServedModel, prompt_tokens: int, asked: int | None) -> int:
    """Returns the maximum length of an answer: as requested, or what the context has room for."""
    if asked is not None:
        return asked
    if model.context_length is None:
        return UNBOUNDED
    return max(model.context_length - prompt_tokens, 1)


def _bias(given: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    wrong = ", ".join(repr(key[:40]) for key in given or {} if not (key.isascii() and key.isdigit()))
    if wrong:
        raise Refused(f"logit_bias: {wrong[:200]} is not a token id; expected whole numbers as strings", "logit_bias")
    return tuple((int(token), bias) for token, bias in (given or {}).items())


def choices(asked: Sampling) -> int:
    return asked.n if asked.n is not None else 1


def include_usage_of(asked: Sampling) -> bool:
    """Raises Refused for stream_options without a stream."""
    if asked.stream_options is None:
        return False
    if not asked.stream:
        raise Refused("stream_options needs stream: true", "stream_options")
    return bool(asked.stream_options.include_usage)
