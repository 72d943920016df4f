"""Random requests: prompts, sampling parameters, modes, pauses and cancellations, all drawn from a seed and a number.

A request depends on nothing but its seed and number, so any range of requests can be repeated by itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.protocol.sampling import MAX_SEED, SamplingParams
from tests.harness.requests import TimedRequest

MODES = ("ar", "sd", "ssd", "auto")
# Strings that are frequent in code and prose.
STOPS = ("\n\n", "return", " the", "):", '",', "self", "e", "\n    ")
LONGEST_PROMPT, LONGEST_TEXT = 900, 80
CANCEL_SHARE = 0.12
PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Sizes:
    """The maximum number of tokens of a prompt, and of an answer."""

    prompt: int = LONGEST_PROMPT
    text: int = LONGEST_TEXT


def draw_prompt(number: int, seed: int, source: Sequence[int], sizes: Sizes) -> tuple[tuple[int, ...], SamplingParams]:
    """Returns a prompt from the tokens of `source`, mostly short and sometimes long, and its sampling parameters."""
    rng = random.Random(f"subject {seed} {number}")
    length = round(math.exp(rng.uniform(0, math.log(sizes.prompt))))
    start = rng.choice((0, rng.randrange(len(source) - length), rng.randrange(len(source) - length)))
    return tuple(source[start : start + length]), _sampling(rng, sizes.text, source)


def draw_request(number: int, seed: int, prompt: tuple[tuple[int, ...], SamplingParams]) -> TimedRequest:
    """Returns request `number` with this result of `draw_prompt`, its mode and its pause; some are cancelled early."""
    rng = random.Random(f"question {seed} {number}")
    tokens, sampling = prompt
    has_own_settings = rng.random() < 0.5
    return TimedRequest(
        tokens,
        sampling,
        MODES[number % len(MODES)],
        after=rng.expovariate(1 / PAUSE_S),
        until=rng.randint(1, sampling.max_tokens) if rng.random() < CANCEL_SHARE else None,
        num_draft_tokens=rng.randint(1, 8) if has_own_settings else None,
        branches=rng.randint(1, 24) if has_own_settings else None,
    )


def _sampling(rng: random.Random, longest: int, source: Sequence[int]) -> SamplingParams:
    def sometimes(share: float, *values: float) -> float | None:
        return rng.choice(values) if rng.random() < share else None

    temp = rng.choice((0.0, 0.8))
    drawn = {
        "top_p": sometimes(0.3, 0.8, 0.95),
        "min_p": sometimes(0.2, 0.05),
        "top_k": sometimes(0.2, 5, 40),
        "repetition_penalty": sometimes(0.25, 1.1, 1.3),
        "presence_penalty": sometimes(0.2, 0.5, -0.3),
        "frequency_penalty": sometimes(0.2, 0.3),
    }
    bias = {token: rng.choice((-100.0, -2.0, 1.5)) for token in rng.sample(source, 3)} if rng.random() < 0.2 else {}
    return SamplingParams(
        max_tokens=rng.randint(1, longest),
        temp=temp,
        logit_bias=tuple(bias.items()),
        stop=tuple(rng.sample(STOPS, rng.randint(1, 2))) if rng.random() < 0.25 else (),
        ignore_eos=rng.random() < 0.5,
        seed=rng.randint(0, MAX_SEED),
        **{name: value for name, value in drawn.items() if value is not None},  # type: ignore[arg-type]
    )
