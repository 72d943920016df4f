"""Random messages of every type, generated from the field types."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec import inspect as types

from outrider.protocol.sampling import MAX_LOGPROBS, MAX_SEED, SAMPLING_RULES, Grammar, SamplingParams
from outrider.protocol.schema import Array


def strategy_for_type(shape: types.Type) -> st.SearchStrategy[Any]:
    match shape:
        case types.IntType(ge=int(low), le=int(high)):
            return st.integers(low, high) | st.sampled_from((low, high))
        case types.FloatType(ge=least, le=most):
            return st.floats(least, most, allow_nan=False, allow_infinity=False)
        case types.EnumType(cls=cls):
            return st.sampled_from(cls)
        case types.BoolType():
            return st.booleans()
        case types.StrType(pattern=str(pattern)):
            return st.sampled_from(pattern[2:-3].split("|"))
        case types.StrType(max_length=int(limit)):
            return st.text(max_size=min(limit, 20))
        case types.Metadata(extra={"array": Array(dtype, axes, least)}):
            low = {} if least is None else {"min_value": least}
            finite = {"allow_nan": False, "allow_infinity": False} if dtype.startswith("float") else {}
            lengths = hnp.array_shapes(min_dims=axes, max_dims=axes, min_side=0, max_side=5)
            return hnp.arrays(dtype, lengths, elements={**low, **finite})
        case types.VarTupleType(item_type=item, max_length=int(limit)):
            return st.lists(strategy_for_type(item), max_size=min(limit, 5)).map(tuple)
        case types.DictType(key_type=key, value_type=value, max_length=int(limit)):
            return st.dictionaries(strategy_for_type(key), strategy_for_type(value), max_size=min(limit, 5))
        case types.TupleType(item_types=items):
            return st.tuples(*map(strategy_for_type, items))
        case types.UnionType(types=(inner, types.NoneType())):
            return st.none() | strategy_for_type(inner)
        case types.UnionType(types=variants):
            return st.one_of(*map(strategy_for_type, variants))
        case types.StructType(cls=cls) | types.DataclassType(cls=cls):
            narrow = {SamplingParams: sampling, Grammar: grammars}.get(cls)
            return strategy_for_class(cls) if narrow is None else narrow()
    raise TypeError(f"{shape} has no bounds")


@cache  # building a strategy is slow
def strategy_for_class(cls: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{field.name: strategy_for_type(field.type) for field in types.type_info(cls).fields})


def sampling() -> st.SearchStrategy[SamplingParams]:
    """SamplingParams accepts narrower ranges than its field types."""
    return st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 2**31 - 1),
        temp=st.floats(0, 100),
        top_p=st.floats(0, 1),
        top_k=st.integers(0, 2**31 - 1),
        logit_bias=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-1e6, 1e6)), max_size=3).map(tuple),
        seed=st.none() | st.integers(0, MAX_SEED),
        stop=st.lists(st.text(min_size=1, max_size=9), max_size=3).map(tuple),
        ignore_eos=st.booleans(),
        rule=st.sampled_from(SAMPLING_RULES),
        logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
    ) | st.builds(SamplingParams, grammar=grammars())


def grammars() -> st.SearchStrategy[Grammar]:
    letters = st.text(min_size=1, max_size=9).filter(str.strip)
    schemas = st.builds(Grammar.json_schema, st.dictionaries(st.text(max_size=3), st.integers() | st.booleans()))
    return schemas | st.builds(Grammar, st.sampled_from(("regex", "grammar")), letters)


def same(left: object, right: object) -> bool:
    """Whether two messages are equal. Compares the elements of arrays, and 1 does not equal True."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if type(left) is not type(right):
        return False
    if names := getattr(left, "__struct_fields__", None) or getattr(left, "__dataclass_fields__", None):
        return all(same(getattr(left, field), getattr(right, field)) for field in names)
    return left == right


@pytest.fixture(scope="session")
def random_message() -> Callable[[type[Any]], st.SearchStrategy[Any]]:
    """Returns a function from a message class to a strategy for its messages."""
    return strategy_for_class


@pytest.fixture
def run_until_killed() -> Callable[[str, str], None]:
    """Returns a function that runs Python code, which kills its own process, with one argument."""

    def run(code: str, argument: str) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code, argument], env=environment, timeout=200)
        assert done.returncode == -signal.SIGKILL

    return run


@pytest.fixture(scope="session")
def same_message() -> Callable[[object, object], bool]:
    return same
