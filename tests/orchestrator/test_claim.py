"""`outrider verify` checks a whole output: truncated, continued or changed text and a wrong finish reason are found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.orchestrator.cli.verify import Output, find_faults
from outrider.protocol.sampling import SamplingParams

EOS = 0
CONTEXT = 1024
TEXT = "é = '你好'\nreturn 1"


@pytest.fixture
def prompt(codec):
    return codec.encode("def f(")


def output(codec, text, reason, *more, **sampling):
    """Returns a valid output. If its reason is "length", `max_tokens` is its length."""
    tokens = (*codec.encode(text, special=False), *more)
    wanted = sampling.pop("max_tokens", len(tokens) if reason == "length" else 256)
    params = SamplingParams(max_tokens=wanted, **sampling)
    return Output("m", "def f(", True, 3, params, tokens, text, reason)


@pytest.fixture
def valid_outputs(codec):
    return [
        output(codec, TEXT, "length"),
        output(codec, TEXT, "eos", EOS),
        replace(output(codec, TEXT + "\n\n", "stop", stop=("\n\n", "never")), text=TEXT),
        output(codec, TEXT, "eos", EOS, stop=("\n\n",)),
    ]


def test_valid_output_has_no_fault(codec, prompt, valid_outputs):
    for one in valid_outputs:
        assert find_faults(one, codec, prompt, CONTEXT) == ()


def test_truncated_output_is_detected_at_every_length(codec, prompt, valid_outputs):
    for one in valid_outputs:
        for length in range(len(one.token_ids)):
            for text in (one.text, codec.decode(one.token_ids[:length])):
                short = replace(one, token_ids=one.token_ids[:length], text=text)
                assert any("it ends after" in fault for fault in find_faults(short, codec, prompt, CONTEXT)), length


def test_output_continued_past_its_end_is_detected(codec, prompt, valid_outputs):
    for one in valid_outputs:
        longer = replace(one, token_ids=(*one.token_ids, 5))
        assert any("tokens, but ends with" in fault for fault in find_faults(longer, codec, prompt, CONTEXT))


def test_changed_text_is_detected_with_its_position(codec, prompt, valid_outputs):
    for one in valid_outputs:
        for changed in (one.text[:4] + "X" + one.text[5:], one.text + "!", one.text[:-1], ""):
            (fault,) = find_faults(replace(one, text=changed), codec, prompt, CONTEXT)
            assert "text differs from its tokens" in fault
    assert "at character 4:" in find_faults(replace(valid_outputs[0], text=TEXT[:4] + "X"), codec, prompt, CONTEXT)[0]


def test_wrong_finish_reason_is_detected(codec, prompt, valid_outputs):
    for one in valid_outputs:
        for reason in {"eos", "stop", "length", "cancelled"} - {one.finish_reason}:
            (fault,) = find_faults(replace(one, finish_reason=reason), codec, prompt, CONTEXT)
            assert f"is {reason}, but it ends with {one.finish_reason}" in fault


def test_full_context_ends_with_reason_length(codec, prompt):
    one = output(codec, TEXT, "length", max_tokens=500)
    assert find_faults(one, codec, prompt, len(prompt) + len(one.token_ids)) == ()
    assert "it ends after" in find_faults(one, codec, prompt, CONTEXT)[0]


def test_ignored_end_token_is_part_of_the_text(codec, prompt):
    tokens = (*codec.encode("a", special=False), EOS)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    one = Output("m", "def f(", True, 3, params, tokens, "a<|endoftext|>", "length")
    assert find_faults(one, codec, prompt, CONTEXT) == ()
    assert find_faults(replace(one, sampling=replace(params, ignore_eos=False)), codec, prompt, CONTEXT)


def test_incomplete_final_character_is_part_of_the_text(codec, prompt):
    tokens = codec.encode("你", special=False)[:1]
    one = Output("m", "def f(", True, 3, SamplingParams(max_tokens=1), tokens, "\ufffd", "length")
    assert find_faults(one, codec, prompt, CONTEXT) == ()
    assert find_faults(replace(one, text=""), codec, prompt, CONTEXT)
