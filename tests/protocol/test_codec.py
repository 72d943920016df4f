"""Every message decodes to what was encoded, and encoding an invalid message raises an error."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import msgpack
from msgspec.structs import replace

from outrider.protocol.codec import MESSAGES, decode, decode_all, encode, encode_all, read_request_id
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import (
    Autonomous,
    Branch,
    Branches,
    Close,
    Commit,
    Drafted,
    DraftTokens,
    Features,
    Generate,
    Hello,
    InProcess,
    Outcome,
    Span,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ

EXAMPLES = int(os.environ.get("OUTRIDER_FUZZ", "10"))
SPAN = Span(1, 2)
VERIFY = Verify("r", 1, 2, 30, DraftTokens((4, 5, 6)))
OUTCOME = Outcome("r", 1, 2, 30, 0, 4, SPAN)


def prompt(tokens):
    """Returns a message with one array."""
    return Generate("r", None, tokens, SamplingParams())


@pytest.mark.parametrize("cls", MESSAGES.values(), ids=MESSAGES)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_message_round_trips_through_the_codec(cls, random_message, same_message, data):
    message = data.draw(random_message(cls))
    frames = [bytes(frame) for frame in encode(message)]
    assert same_message(decode(frames), message)
    assert read_request_id(frames) == getattr(message, "request", None)


def test_arrays_are_sent_as_raw_little_endian_frames_and_decoded_read_only():
    header, raw = encode(prompt(np.array([1, 258], np.int32)))
    assert bytes(raw) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert msgpack.decode(header)[1]["tokens"] == ["int32", [2]]
    assert not decode([header, bytes(raw)]).tokens.flags.writeable


def test_two_arrays_keep_their_order_and_an_absent_one_takes_no_frame():
    ids, probs = np.array([[1, 2]], np.int32), np.array([[0.5, 0.25]], np.float32)
    both = decode(encode(replace(VERIFY, proposal=DraftTokens((4,), q=SparseQ(ids, probs))))).proposal
    assert (both.q.ids == ids).all() and (both.q.probs == probs).all()
    frames = encode(OUTCOME)
    assert len(frames) == 1 and decode(frames).logprobs is None


def test_feature_rows_are_sent_in_half_precision():
    rows = np.array([[0.5, -65504.0]], np.float16)
    frames = encode(Features("r", 1, 7, rows))
    assert len(frames[1]) == 4 and (decode(frames).rows == rows).all()


def test_a_coupled_rounds_messages_are_one_frame_each():
    for message in (VERIFY, Branches("r", 1, 2, 3, (Branch((1,), (2,)),), SPAN), Drafted("r", 1, 2, 3, (4,), SPAN)):
        assert len(encode(message)) == 1


def test_strided_array_is_sent_in_logical_order():
    tokens = np.arange(10, dtype=np.int32)[::-3]
    assert decode(encode(prompt(tokens))).tokens.tolist() == [9, 6, 3, 0]


def test_integer_sampling_value_is_decoded_as_a_float():
    sampling = decode(encode(Generate("r", "p", None, SamplingParams(temp=1)))).sampling
    assert sampling.temp == 1.0 and type(sampling.temp) is float


INVALID_MESSAGES = {
    "negative": (replace(VERIFY, round=-1), "Verify.round is invalid: expected `int` >= 0"),
    "too large": (replace(VERIFY, base_len=2**31), "Verify.base_len"),
    "bool for int": (replace(VERIFY, epoch=True), "Verify.epoch is invalid: expected `int`, got `bool`"),
    "numpy int": (replace(VERIFY, proposal=DraftTokens((np.int64(3),))), r"np.int64\(3\)"),
    "too long": (
        replace(VERIFY, proposal=DraftTokens((1,) * 65)),
        "Verify.proposal.chain is invalid: expected `array` of length <= 64",
    ),
    "no word": (
        Hello("guess", "", 1, "", "", 1, 1, 1, 1, incarnation=1),
        r"Hello.role is invalid: expected `str` matching .*target\|draft\|prefill",
    ),
    "no draft": (
        replace(VERIFY, proposal=Autonomous(9, InProcess(0))),
        "Verify.proposal.draft.depth is invalid: expected `int` >= 1",
    ),
    "name too long": (Close("r" * 65), "Close.request is invalid: expected `str` of length <= 64"),
    "missing array": (Features("r", 1, 7, None), "Features.rows is invalid: expected"),
    "other dtype": (prompt(np.zeros(2, np.int64)), "Generate.tokens"),
    "other axes": (prompt(np.zeros((1, 2), np.int32)), "Generate.tokens"),
    "negative token": (
        prompt(np.array([3, -1], np.int32)),
        "expected no number under 0, got -1",
    ),
    "not finite": (
        Features("r", 1, 7, np.array([[np.inf]], np.float16)),
        "Features.rows is invalid: expected finite numbers",
    ),
    "inside an entry": (
        Branches("r", 1, 2, 3, (Branch((1,), (2,)), Branch((-1,), (2,))), SPAN),
        r"Branches.entries\[1\].committed\[0\] is invalid: expected `int` >= 0",
    ),
    "other record": (
        Outcome("r", 1, 2, 3, 0, 4, Branch((1,), ())),
        "Outcome.work is invalid: .* unknown field `committed`",
    ),
    "no message": (SPAN, "the message name is ''; expected the name of a message"),
    "not unicode": (
        Generate("r", "\ud800", None, SamplingParams()),
        "Generate can't be encoded .* expected Unicode",
    ),
}


@pytest.mark.parametrize(("message", "sentence"), INVALID_MESSAGES.values(), ids=INVALID_MESSAGES)
def test_encoding_an_invalid_message_raises_protocol_error(message, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        encode(message)


def test_commit_holds_all_tokens_of_a_fully_accepted_chain():
    """K = MAX_CHAIN chain tokens accepted and the bonus token make one more than a chain."""
    longest = tuple(range(64))
    assert decode(encode(Commit("r", 1, 2, 300, (*longest, 7), longest, 64, 12))).tokens == (*longest, 7)


def test_messages_encoded_together_are_decoded_in_order():
    ids, probs = np.array([[1, 2]], np.int32), np.array([[0.5, 0.25]], np.float32)
    drawn = replace(VERIFY, proposal=DraftTokens((4,), q=SparseQ(ids, probs)))
    together = encode_all((OUTCOME, drawn, Close("r"), VERIFY))
    assert len(together) == 6
    first, second, *rest = decode_all(together)
    assert first == OUTCOME and (second.proposal.q.ids == ids).all() and (second.proposal.q.probs == probs).all()
    assert rest == [Close("r"), VERIFY]


def test_one_invalid_message_refuses_all_messages_sent_with_it():
    header, raw = encode(prompt(np.array([1], np.int32)))
    for frames in ([], [*encode(VERIFY), header], [*encode(VERIFY), raw], [header, *encode(VERIFY)]):
        with pytest.raises(ProtocolError):
            decode_all(frames)
    with pytest.raises(ProtocolError, match="2 frames too many"):
        decode([*encode(VERIFY), *encode(OUTCOME), *encode(VERIFY)])


def test_oversized_frame_is_refused_before_sending(monkeypatch):
    monkeypatch.setattr("outrider.protocol.codec.MAX_FRAME_BYTES", 1000)
    encode(Generate("q", "x" * 500, None, SamplingParams()))
    tokens = np.ones(251, np.int32)
    for long in (Generate("q", "x" * 1001, None, SamplingParams()), Generate("q", None, tokens, SamplingParams())):
        with pytest.raises(ProtocolError, match=r"Generate has a frame of 1,.* bytes; expected at most 1,000"):
            encode(long)


FIRST_READS = """
import sys, threading
from outrider.protocol.codec import decode
frames = [bytes.fromhex(line) for line in sys.stdin]
sys.setswitchinterval(1e-6)
start = threading.Barrier(8)

def read():
    start.wait()
    for frame in frames:
        decode([frame])

threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_read_their_first_messages_at_the_same_time():
    """msgspec describes a class when a message of it is first decoded, which is not safe in two threads at once."""
    messages = [VERIFY, OUTCOME, Generate("r", "text", None, SamplingParams())]
    sent = "\n".join(bytes(encode(message)[0]).hex() for message in messages)
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_READS], input=sent, text=True, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
