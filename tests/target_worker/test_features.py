"""Features of a long prompt are sent in pieces that a slow link carries before its heartbeats close it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from outrider.protocol.endpoints import MAX_PIECE_BYTES
from outrider.target_worker.target_request import FeatureListener


def test_features_of_a_long_prompt_are_sent_in_pieces_without_gaps() -> None:
    listener = FeatureListener("r", 0)
    rows = np.arange(2 * MAX_PIECE_BYTES // 200 * 100, dtype=np.float32).reshape(-1, 100) % 1000
    listener.on_features(7, mx.array(rows[:-1]))
    listener.on_features(7 + len(rows) - 1, mx.array(rows[-1:]))
    pieces = listener.take()
    assert max(piece.rows.nbytes for piece in pieces) <= MAX_PIECE_BYTES and len(pieces) > 2
    ends = [piece.position + len(piece.rows) for piece in pieces]
    assert [piece.position for piece in pieces] == [7, *ends[:-1]]
    assert np.array_equal(np.concatenate([piece.rows for piece in pieces]), rows)
