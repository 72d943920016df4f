"""Generates random messages of any kind from the types of their fields."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from msgspec import inspect as types

from outrider.protocol.codec import MESSAGES
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SAMPLING_RULES, SamplingParams
from outrider.protocol.schema import Array

MAX_ITEMS = 4
LETTERS = 'ab \n"{}[]<|>\\é☃\U0001f600\0'


def random_message(rng: random.Random, name: str) -> Any:
    """Returns a message of the type with this name, with random values of the declared types."""
    while True:
        try:
            return _random_struct(rng, MESSAGES[name])
        except InvalidRequest:  # sampling parameters have narrower ranges than their types
            continue


def random_int(rng: random.Random, low: int, high: int) -> int:
    """Returns a random integer in [low, high], more often near `low` or equal to one of them."""
    return rng.choice(
        (low, high, min(high, low + rng.randrange(8)), min(high, low + rng.randrange(300)), rng.randint(low, high))
    )


def _random_struct(rng: random.Random, cls: type[Any]) -> Any:
    info = types.type_info(cls)
    if cls is SamplingParams or not isinstance(info, types.StructType | types.DataclassType):
        return _random_sampling(rng)
    return cls(**{field.name: _random_value(rng, field.type) for field in info.fields})


def _random_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 40),
        temp=rng.choice((0.0, 0.8, 100.0)),
        top_p=rng.choice((0.0, 0.5, 1.0)),
        top_k=rng.choice((0, 1, 2**31 - 1)),
        repetition_penalty=rng.choice((1.0, 1.3)),
        logit_bias=rng.choice(((), ((rng.randrange(300), -100.0),))),
        seed=rng.choice((0, 1, 2**32 - 1)),
        stop=rng.choice(((), ("a",))),
        rule=rng.choice(SAMPLING_RULES),
        logprobs=rng.choice((None, None, 2)),
    )


def _random_value(rng: random.Random, shape: types.Type) -> Any:
    match shape:
        case types.IntType(ge=int(low), le=int(high)):
            return random_int(rng, low, high)
        case types.FloatType(ge=0.0, le=1.0):
            return rng.choice((0.0, 1.0, rng.random()))
        case types.FloatType():
            return rng.choice((0.0, -1.5, 1e308, rng.random()))
        case types.EnumType(cls=cls):
            return rng.choice(list(cls))
        case types.BoolType():
            return rng.random() < 0.5
        case types.StrType(pattern=str(pattern)):
            return rng.choice(pattern[2:-3].split("|"))
        case types.StrType(max_length=int(limit)):
            return "".join(rng.choices(LETTERS, k=rng.randrange(min(limit, MAX_ITEMS) + 1)))
        case types.Metadata(extra={"array": Array(dtype, axes)}):
            size = [rng.randrange(MAX_ITEMS) for _ in range(axes)]
            return np.array(rng.choices(range(300), k=int(np.prod(size)))).reshape(size).astype(dtype)
        case types.VarTupleType(item_type=item, max_length=int(limit)):
            return tuple(_random_value(rng, item) for _ in range(rng.randrange(min(limit, MAX_ITEMS) + 1)))
        case types.DictType(key_type=key, value_type=value, max_length=int(limit)):
            return {
                _random_value(rng, key): _random_value(rng, value)
                for _ in range(rng.randrange(min(limit, MAX_ITEMS) + 1))
            }
        case types.TupleType(item_types=items):
            return tuple(_random_value(rng, item) for item in items)
        case types.UnionType(types=(inner, types.NoneType())):
            return _random_value(rng, inner) if rng.random() < 0.5 else None
        case types.UnionType(types=variants):
            return _random_value(rng, rng.choice(variants))
        case types.StructType(cls=cls) | types.DataclassType(cls=cls):
            return _random_struct(rng, cls)
    raise TypeError(f"{shape} has no values")
