"""How much of a new prompt is read per forward: a share of a usual forward, less with chains."""

from __future__ import annotations

import pytest

from outrider.target_worker.model_runner import (
    MIN_CHUNK_TOKENS,
    READING_SHARE,
    READING_SHARE_WITH_CHAINS,
    ChunkedPrefill,
)

DECODING, FIXED_MS, ROW_MS = 8, 10.0, 0.5


def lengthened(rows: int, usual: int) -> float:
    """By what share of a forward over the usual rows one over so many and the newcomer's piece takes longer."""
    pieces = ChunkedPrefill()
    for seen in (8, 16, 32, 64):
        pieces.observe(0, 0, seen, FIXED_MS + ROW_MS * seen)
    pieces.observe(DECODING, usual, usual, FIXED_MS + ROW_MS * usual)
    pieces.last = 1000
    read = pieces.budget(1, DECODING, rows)
    return (rows - usual + read) * ROW_MS / (FIXED_MS + ROW_MS * usual)


@pytest.mark.parametrize(
    ("rows", "usual", "share"),
    [(8, 8, READING_SHARE), (60, 60, READING_SHARE_WITH_CHAINS), (30, 50, READING_SHARE_WITH_CHAINS)],
)
def test_prompt_piece_lengthens_a_forward_by_a_fixed_share(rows: int, usual: int, share: float) -> None:
    """A smaller share beside chains; whose forward has few rows has room for a longer piece."""
    assert lengthened(rows, usual) == pytest.approx(share, abs=ROW_MS / FIXED_MS)


def test_prompt_piece_is_smallest_beside_more_chains_than_usual() -> None:
    more = (MIN_CHUNK_TOKENS + 60 - 30) * ROW_MS / (FIXED_MS + ROW_MS * 30)
    assert lengthened(60, usual=30) == pytest.approx(more)
