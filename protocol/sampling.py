"""What a request wants sampled: the parameters both workers share.

Knows nothing of logits. Names and defaults are mlx-lm's, except that "off" is always the neutral value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from outrider.protocol.errors import InvalidRequest

MAX_SEED = 2**63 - 1
LEAST_TEMP = 1e-3
RULES = ("coupled", "residual")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when generation ends.

    `temp` 0 is greedy, and below `LEAST_TEMP` it becomes 0: float32 could no longer hold a score of logit / `temp` with
    the noise that decides between near equals. `top_p` 1, `min_p` 0, `top_k` 0 and penalties of 0 are off;
    `repetition_penalty` 1 is off. `seed` None means: draw one and report it. Penalties look at the last
    `*_context_size` tokens, prompt included.

    `rule` is how proposals are verified above temperature 0: "coupled", or "residual" (docs/exactness.md). For residual
    sampling a draft proposes from its `q_width` likeliest tokens, with the weight of those that work ahead prepares for
    multiplied by `saguaro` (the C of the SSD paper, definition 14).

    `max_tokens` and context sizes are at least 1, `temp` is 0 to 100, `top_p` and `min_p` 0 to 1, `top_k` at least 0,
    `repetition_penalty` 0.01 to 100, the other penalties -100 to 100, a bias -10^6 to 10^6, `seed` 0 to 2^63-1,
    `saguaro` 0.01 to 1 (1 is off), `q_width` 1 to 1024.

    Raises:
        InvalidRequest: a value is out of range; the message names the field, the value and what is allowed.
    """

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    repetition_context_size: int = 20
    presence_penalty: float = 0.0
    presence_context_size: int = 20
    frequency_penalty: float = 0.0
    frequency_context_size: int = 20
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    rule: str = "coupled"
    saguaro: float = 1.0
    q_width: int = 100

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_float("temp", self.temp, 0.0, 100.0)
        if self.temp < LEAST_TEMP:
            object.__setattr__(self, "temp", 0.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, 0, 2**31 - 1)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_float("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for name in ("repetition_context_size", "presence_context_size", "frequency_context_size"):
            _check_int(name, getattr(self, name), 1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        _check_bias(self.logit_bias)
        if not isinstance(self.stop, tuple) or any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequest(f"stop is {self.stop!r}; expected a tuple of non-empty strings")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(f"ignore_eos is {self.ignore_eos!r}; expected True or False")
        self._check_rule()

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            raise InvalidRequest(f"sampling rule is {self.rule!r}; expected {' or '.join(RULES)}")
        _check_float("saguaro", self.saguaro, 0.01, 1.0)
        _check_int("q_width", self.q_width, 1, 1024)
        if self.saguaro != 1.0 and self.rule != "residual":
            raise InvalidRequest(f"saguaro is {self.saguaro:g}; without residual sampling expected 1")

    @property
    def is_residual(self) -> bool:
        """True when chains are verified by rejection sampling. At temperature 0 both rules are equality."""
        return self.rule == "residual" and self.temp > 0

    @property
    def has_penalties(self) -> bool:
        """True when the choice of a token depends on the tokens before it other than through the model."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @classmethod
    def greedy(cls, **changes: Any) -> SamplingParams:
        """The most likely token, always."""
        return cls(**changes)

    @classmethod
    def balanced(cls, **changes: Any) -> SamplingParams:
        """Some variety, few surprises."""
        return replace(cls(temp=0.7, top_p=0.95), **changes)

    @classmethod
    def creative(cls, **changes: Any) -> SamplingParams:
        """Much variety; min-p keeps nonsense out."""
        return replace(cls(temp=1.0, min_p=0.05), **changes)


def _check_bias(pairs: object) -> None:
    if not isinstance(pairs, tuple) or any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise InvalidRequest(f"logit_bias is {pairs!r}; expected a tuple of (token, bias) pairs")
    for token, bias in pairs:
        _check_int("logit_bias token", token, 0, 2**31 - 1)
        _check_float("logit_bias value", bias, -1e6, 1e6)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}; expected a whole number from {low} to {high}")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN is in no range
        raise InvalidRequest(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")
