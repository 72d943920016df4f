"""Invalid input raises only ProtocolError: one sentence with what was expected."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import msgpack, structs

from outrider.protocol.codec import MESSAGES, decode, encode, read_request_id
from outrider.protocol.errors import InvalidRequest, ProtocolError, RefusedRequest
from outrider.protocol.messages import Branch, Branches, Done, Features, Generate, Outcome, Span, Timings
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.version import PROTOCOL_VERSION

EXAMPLES = int(os.environ.get("OUTRIDER_FUZZ", "5"))
QUIET = settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
OUTCOME = Outcome("r", 1, 2, 30, 2, 7, Span(5, 6))
FEATURES = Features("r", 1, 7, np.zeros((1, 2), np.float16))
BRANCHES = Branches("r", 1, 2, 30, (Branch((1,), (2, 3)), Branch((1, 4), (5, 6))), Span(5, 6))
GENERATE = Generate("r", "p", None, SamplingParams())
CLOSE = {"type": "Close", "request": "r"}
PROMPT = Generate("r", None, np.array([1, 2], np.int32), SamplingParams())

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def is_refused(frames):
    """Whether decoding raises ProtocolError, whose message must be one line. Other exceptions fail the test."""
    read_request_id(frames)
    try:
        decode(frames)
    except ProtocolError as error:
        assert str(error) and "\n" not in str(error)
        return True
    return False


def fields_sent(message, **changes):
    """Returns the fields in the header of a message, including `type`, with some of them changed."""
    return msgpack.decode(encode(message)[0])[1] | changes


def framed(fields, *raw, version=PROTOCOL_VERSION):
    return [msgpack.encode([version, fields]), *raw]


@QUIET
@given(st.lists(st.binary(max_size=64), max_size=4))
@example([])
@example([b""])
@example([b"\x90"])
@example([b"\xc1"])
@example([b"\x92\x01\x82\xa4type\xa5Close\xa7request\xa1\xff"])
def test_random_frames_are_refused(frames):
    assert is_refused(frames)


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=MESSAGES)
@settings(QUIET, max_examples=EXAMPLES)
@given(data=st.data())
def test_flipped_bits_and_lost_bytes_raise_only_protocol_error(cls, random_message, data):
    frames = [bytes(frame) for frame in encode(data.draw(random_message(cls)))]
    which = data.draw(st.integers(0, len(frames) - 1))
    if frames[which]:
        bit = data.draw(st.integers(0, len(frames[which]) * 8 - 1))
        flipped = bytearray(frames[which])
        flipped[bit // 8] ^= 1 << bit % 8
        is_refused([*frames[:which], bytes(flipped), *frames[which + 1 :]])
        cut = [*frames[:which], frames[which][: bit // 8], *frames[which + 1 :]]
        assert is_refused(cut)
    assert is_refused(frames[:which])
    assert is_refused([*frames, b""])


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=MESSAGES)
@settings(QUIET, max_examples=EXAMPLES)
@given(data=st.data())
def test_arbitrary_field_values_raise_only_protocol_error(cls, random_message, data):
    header, *raw = [bytes(frame) for frame in encode(data.draw(random_message(cls)))]
    fields = msgpack.decode(header)[1]
    for name in ("type", *cls.__struct_fields__):
        is_refused(framed(fields | {name: data.draw(anything)}, *raw))
    is_refused(framed(data.draw(anything), *raw))


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=MESSAGES)
@settings(QUIET, max_examples=3)
@given(data=st.data())
def test_missing_or_unknown_field_is_refused_and_named(cls, random_message, data):
    message = data.draw(random_message(cls))
    header, *raw = [bytes(frame) for frame in encode(message)]
    fields = msgpack.decode(header)[1]
    with pytest.raises(ProtocolError, match=f"^{cls.__name__} is invalid: object contains unknown field `nothing`"):
        decode(framed(fields | {"nothing": 1}, *raw))
    for field in structs.fields(cls):
        if field.required and not isinstance(getattr(message, field.name), np.ndarray):
            with pytest.raises(ProtocolError, match=f"{cls.__name__} is invalid: .* required field `{field.name}`"):
                decode(framed({name: fields[name] for name in fields if name != field.name}, *raw))


def test_message_encoded_as_a_list_is_refused():
    with pytest.raises(ProtocolError, match="the message name is ''; expected the name"):
        decode(framed(["Close", "r"]))


def test_version_mismatch_error_names_both_versions_and_the_remedy():
    later = PROTOCOL_VERSION + 1
    for frames in (framed(CLOSE, version=later), [msgpack.encode([later])]):
        with pytest.raises(ProtocolError, match=f"version {later}, .* version {PROTOCOL_VERSION} .* same release"):
            decode(frames)
    assert read_request_id(framed(CLOSE, version=later)) == "r"


@pytest.mark.parametrize("version", [True, None, 1.0, "1", [1]])
def test_version_that_is_not_an_integer_is_refused(version):
    with pytest.raises(ProtocolError, match=r"the header is invalid: .* expected \[version, message\]"):
        decode(framed(CLOSE, version=version))


@pytest.mark.parametrize("name", ["Nothing", "SamplingParams", "Span", None, 3, ["Close"], ["Close", 1]])
def test_only_registered_messages_are_decoded(name):
    with pytest.raises(ProtocolError, match="message name"):
        decode(framed({"type": name, "request": "r"}))


REFUSED = {
    "bool for int": (OUTCOME, {"accepted": True}, "Outcome.accepted is invalid: expected `int`, got `bool`"),
    "float for int": (OUTCOME, {"bonus": 1.0}, "Outcome.bonus is invalid: expected `int`, got `float`"),
    "negative": (OUTCOME, {"base_len": -1}, "Outcome.base_len is invalid: expected `int` >= 0"),
    "token too large": (OUTCOME, {"bonus": 2**31}, "Outcome.bonus"),
    "nested field": (
        OUTCOME,
        {"work": {"started_ns": 1, "ended_ns": "now"}},
        "Outcome.work.ended_ns is invalid",
    ),
    "bytes for text": (OUTCOME, {"request": b"r"}, "Outcome.request is invalid: expected `str`, got `bytes`"),
    "too many": (BRANCHES, {"entries": [{}] * 1025}, "expected `array` of length <= 1024"),
    "entry": (BRANCHES, {"entries": [7]}, r"Branches.entries\[0\] is invalid: expected `object`, got `int`"),
    "word": (GENERATE, {"mode": "fast"}, r"Generate.mode is invalid: expected `str` matching .*auto\|ar\|sd\|ssd"),
    "int for bool": (GENERATE, {"chat_template": 1}, "Generate.chat_template is invalid: expected `bool`"),
    "no array": (PROMPT, {"tokens": [1, 2]}, "Generate.tokens is invalid: expected"),
    "dtype": (PROMPT, {"tokens": ["object", [2]]}, "Generate.tokens is invalid: expected an array of int32"),
    "axes": (PROMPT, {"tokens": ["int32", [1, 2]]}, "Generate.tokens"),
    "size": (
        PROMPT,
        {"tokens": ["int32", [3]]},
        "Generate.tokens is invalid: expected 12 bytes .*, got 8",
    ),
    "negative length": (PROMPT, {"tokens": ["int32", [-2]]}, "Generate.tokens"),
    "overflowing length": (PROMPT, {"tokens": ["int32", [2**62]]}, "Generate.tokens"),
    "long for nothing": (
        FEATURES,
        {"rows": ["float16", [0, 2**62]]},
        "2 axes of at most 16,777,216",
    ),
}


@pytest.mark.parametrize(("message", "change", "sentence"), REFUSED.values(), ids=REFUSED)
def test_invalid_field_error_names_the_field_and_the_expected_value(message, change, sentence):
    raw = [bytes(frame) for frame in encode(message)[1:]]
    with pytest.raises(ProtocolError, match=sentence):
        decode(framed(fields_sent(message, **change), *raw))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(value):
    done = fields_sent(Done("r", "eos", Timings()), timings={"verify_ms": value})
    with pytest.raises(ProtocolError, match=r"Done.timings.verify_ms is invalid: expected `float` [<>]= -?1.79"):
        decode(framed(done))
    rows = np.array([[value]], "<f2").tobytes()
    with pytest.raises(ProtocolError, match="expected finite numbers"):
        decode(framed(fields_sent(FEATURES, rows=["float16", [1, 1]]), rows))


def test_negative_tokens_in_an_array_are_refused():
    with pytest.raises(ProtocolError, match=r"Generate.tokens is invalid: expected no number under 0, got -1"):
        decode(framed(fields_sent(PROMPT), np.array([-1, 2], "<i4").tobytes()))


def test_missing_or_extra_frames_are_refused():
    with pytest.raises(ProtocolError, match=r"Generate.tokens is invalid: .* bytes in a separate frame"):
        decode(framed(fields_sent(PROMPT)))
    with pytest.raises(ProtocolError, match=r"Close has 2 frames too many"):
        decode(framed(CLOSE, b"", b"x"))


def generate_with(**sampling):
    """Returns the frames of a Generate message with these sampling parameters."""
    return framed(fields_sent(GENERATE, sampling=fields_sent(GENERATE)["sampling"] | sampling))


def test_out_of_range_sampling_raises_refused_request():
    with pytest.raises(RefusedRequest, match=r"^temp is -1.0; expected a number from 0 to 100") as caught:
        decode(generate_with(temp=-1.0))
    assert isinstance(caught.value, InvalidRequest) and caught.value.exit_code == InvalidRequest.exit_code
    assert read_request_id(generate_with(temp=-1.0)) == "r"


def test_read_request_id_reads_only_the_request_field():
    assert read_request_id(framed({"type": "Fault", "name": "target-0", "request": "r", "message": 7})) == "r"
    for fields in ("r", ["r"], {"request": 1}, {"request": "x" * 65}, {}, {"name": "r"}):
        assert read_request_id(framed(fields)) is None


def test_sampling_of_a_wrong_type_is_a_protocol_error():
    for name, value in (("temp", "hot"), ("stop", "x"), ("logit_bias", [[1]]), ("logit_bias", [1]), ("seed", 1.5)):
        with pytest.raises(ProtocolError, match=f"Generate.sampling.{name}"):
            decode(generate_with(**{name: value}))


@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xdf\x00\x00\x00\x01\xa1a"])
def test_deep_nesting_is_refused(opening):
    for depth in (1, 100, 5000):
        assert is_refused([opening * depth + b"\xc0"])


@pytest.mark.parametrize(("claimed", "most"), [(2**32 - 1, 2**20), (60_000, 2**20), (5_000, 2**26)])
def test_claimed_array_length_allocates_no_memory(claimed, most):
    """The message is 5 KB of nested arrays, each of which claims to have `claimed` items."""
    tracemalloc.start()
    try:
        assert is_refused([(b"\xdd" + claimed.to_bytes(4, "big")) * 1000])
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def test_long_unknown_field_name_is_truncated_in_the_error():
    with pytest.raises(ProtocolError) as caught:
        decode(framed(CLOSE | {"x" * 100_000: 1}))
    assert len(str(caught.value)) < 250
