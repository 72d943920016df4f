"""A sparse q is sent with its chain; an invalid q and invalid settings of residual sampling are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.protocol.codec import decode, encode
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Branch, Branches, Span
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ, one_hot

Q = SparseQ(np.array([[4, 9], [2, 4], [9, 1]], np.int32), np.array([[0.25, 0.75], [1, 0], [0.5, 0.5]], np.float32))


def test_token_probability_comes_from_its_own_row() -> None:
    assert Q.of([9, 2, 7]).tolist() == [0.75, 1.0, 0.0]
    assert Q.part(1, 3).of([4, 1]).tolist() == [0.0, 0.5] and len(Q.part(1, 3)) == 2


@pytest.mark.parametrize(
    ("q", "tokens", "fits"),
    [
        (Q, [9, 2, 1], True),
        (one_hot([3, 3]), [3, 3], True),
        (one_hot([]), [], True),
        (Q, [9, 2], False),
        (Q, [9, 2, 7], False),
        (Q, [9, 4, 1], False),
        (SparseQ(Q.ids, Q.probs / 2), [9, 2, 1], False),
        (SparseQ(Q.ids, Q.probs[:, :1]), [9, 2, 1], False),
    ],
)
def test_sparse_q_fits_only_chains_that_can_be_drawn_from_it(q: SparseQ, tokens: list[int], fits: bool) -> None:
    assert q.fits(tokens) is fits


def test_sparse_q_is_sent_as_two_raw_frames() -> None:
    message = Branches("r", 1, 2, 3, (Branch((1,), (9, 2)), Branch((1, 5), (1,))), Span(1, 2), False, Q)
    frames = [bytes(frame) for frame in encode(message)]
    assert [len(frame) for frame in frames[1:]] == [24, 24]
    found = decode(frames).q
    assert (found.ids == Q.ids).all() and (found.probs == Q.probs).all()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"rule": "exact"}, "sampling rule is 'exact'; expected one of coupled, residual"),
        ({"rule": "residual", "saguaro": 0.0}, "saguaro is 0.0; expected a number from 0.01 to 1"),
        ({"rule": "residual", "saguaro": 1.5}, "saguaro is 1.5"),
        ({"saguaro": 0.5}, "saguaro is 0.5; it needs rule residual, or must be 1"),
        ({"rule": "residual", "q_width": 0}, "q_width is 0; expected a whole number from 1 to 1024"),
    ],
)
def test_invalid_residual_settings_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        SamplingParams(**fields)


def test_residual_rule_does_not_apply_at_temperature_zero() -> None:
    assert SamplingParams(temp=0.1, rule="residual").is_residual
    assert not SamplingParams(rule="residual").is_residual and not SamplingParams(temp=1.0).is_residual
