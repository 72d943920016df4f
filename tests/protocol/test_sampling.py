"""The accepted values of sampling parameters, and their normalised form."""

from __future__ import annotations

from dataclasses import asdict, fields

import numpy as np
import pytest

from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import Grammar, SamplingFields, SamplingParams


def test_keywords_are_the_fields_and_another_name_of_temp() -> None:
    keywords = SamplingFields.__annotations__.keys() - {"temperature"}
    single = {field.name for field in fields(SamplingParams)} ^ keywords
    assert not single, f"only one of SamplingFields and SamplingParams has {single}"


def test_top_p_of_zero_is_greedy() -> None:
    assert SamplingParams(temp=0.8, top_p=0).temp == 0.0
    assert SamplingParams(temp=0.8, top_p=1e-6).temp == 0.8


PLAIN = SamplingParams(
    max_tokens=9, temp=0.5, top_p=0.75, top_k=7, seed=2**63 - 1, logit_bias=((11, -5.0), (3, 1.0)), stop=("a", "b"),
    ignore_eos=True,
)  # fmt: skip


@pytest.mark.parametrize(
    "bias",
    [
        {11: -5, 3: 1},
        {np.int32(11): np.float32(-5), np.uint8(3): 1},
        [(11, -5), (3, 1)],
        [[11, -5.0], [3, 1.0]],
    ],
)
@pytest.mark.parametrize("stop", [["a", "b"], ("a", np.str_("b"))])
def test_lists_dicts_and_numpy_numbers_are_normalised(bias, stop) -> None:
    params = SamplingParams(
        max_tokens=np.int64(9), temp=np.float32(0.5), top_p=np.float64(0.75), top_k=np.uint16(7),
        seed=np.uint64(2**63 - 1), logit_bias=bias, stop=stop, ignore_eos=np.bool_(True),
    )  # fmt: skip
    assert params == PLAIN and hash(params) == hash(PLAIN)
    for field in fields(PLAIN):
        assert type(getattr(params, field.name)) is type(getattr(PLAIN, field.name)), field.name
    assert [type(part) for pair in params.logit_bias for part in pair] == [int, float, int, float]
    assert {type(text) for text in params.stop} == {str}


def test_single_stop_string_needs_no_list() -> None:
    assert SamplingParams(stop="end").stop == ("end",)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stop": ""}, "stop is ''; expected a text or a list of texts that are not empty"),
        ({"stop": "\ud83d"}, "expected Unicode text"),
        ({"stop": ["a", ""]}, "texts that are not empty"),
        ({"stop": {"a"}}, "expected a text or a list"),
        ({"stop": None}, "expected a text or a list"),
        ({"logit_bias": [1]}, "logit_bias is .1.; expected a dict"),
        ({"logit_bias": "ab"}, "expected a dict"),
        ({"logit_bias": 3}, "expected a dict"),
        ({"logit_bias": {"a": 1}}, "logit_bias token is 'a'; expected a whole number"),
        ({"logit_bias": {1: "a"}}, "logit_bias value is 'a'; expected a number"),
        ({"temp": "0.5"}, "temp is '0.5'"),
        ({"temp": np.float32("nan")}, "temp is nan"),
        ({"temp": 10**400}, "temp is 1000"),
        ({"top_k": np.float64(3)}, "top_k is 3.0; expected a whole number"),
        ({"max_tokens": np.bool_(True)}, "max_tokens is True"),
        ({"ignore_eos": 1}, "ignore_eos is 1; expected True or False"),
        ({"rule": ["coupled"]}, "sampling rule is"),
        ({"logprobs": 21}, "logprobs is 21; expected a whole number from 0 to 20"),
        ({"logprobs": True}, "logprobs is True"),
        ({"grammar": "[0-9]"}, "grammar is '.0-9.'; expected a Grammar"),
        ({"grammar": {"kind": "regex"}}, "expected a Grammar"),
        ({"grammar": {"kind": "regex", "text": ""}}, "the regular expression is empty"),
        ({"grammar": {"kind": "regex", "text": b"a"}}, "the regular expression is b'a'; expected text"),
        ({"grammar": {"kind": "regex", "text": "\ud800"}}, "the regular expression is .*; expected Unicode text"),
        ({"grammar": {"kind": "json_schema", "text": "null"}}, "the JSON schema is None; expected a JSON object"),
        ({"grammar": Grammar("regex", "a"), "ignore_eos": True}, "decides where the text ends"),
    ],
)
def test_invalid_sampling_parameters_are_refused(given, words) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 10**5000), ("temp", -(10**5000)), ("temp", [5] * 9999), ("rule", "x" * 9999),
     ("stop", ["a", 5] * 9999), ("grammar", "x" * 9999), ("logit_bias", "x" * 9999)],
    ids=range(7),
)  # fmt: skip
def test_message_about_a_huge_value_is_short(name, value) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is .*; expected") as error:
        SamplingParams(**{name: value})
    assert len(str(error.value)) < 400


def test_grammar_can_be_given_as_a_dict() -> None:
    grammar = Grammar.json_schema({"type": "object"})
    assert SamplingParams(grammar=asdict(grammar)) == SamplingParams(grammar=grammar)  # type: ignore[arg-type]
    assert Grammar.json_object() == grammar == Grammar.json_schema('{"type": "object"}')


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize("schema", [{"const": {1, 2}}, {"const": float("nan")}, nested(9999)], ids=range(3))
def test_schema_that_is_not_json_is_refused(schema) -> None:
    with pytest.raises(InvalidRequest, match="can't be written as JSON"):
        Grammar.json_schema(schema)
