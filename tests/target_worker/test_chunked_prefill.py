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


def relative_delay(rows: int, usual: int) -> float:
    """By what share a forward over `rows` and a new prompt's chunk takes longer than one over the `usual` rows."""
    prefill = ChunkedPrefill()
    for seen in (8, 16, 32, 64):
        prefill.observe(0, 0, seen, FIXED_MS + ROW_MS * seen)
    prefill.observe(DECODING, usual, usual, FIXED_MS + ROW_MS * usual)
    prefill.last = 1000
    read = prefill.budget(1, DECODING, rows)
    return (rows - usual + read) * ROW_MS / (FIXED_MS + ROW_MS * usual)


@pytest.mark.parametrize(
    ("rows", "usual", "share"),
    [(8, 8, READING_SHARE), (60, 60, READING_SHARE_WITH_CHAINS), (30, 50, READING_SHARE_WITH_CHAINS)],
)
def test_prompt_piece_lengthens_a_forward_by_a_fixed_share(rows: int, usual: int, share: float) -> None:
    """The share is smaller beside chains. A forward with fewer rows than usual has room for a longer piece."""
    assert relative_delay(rows, usual) == pytest.approx(share, abs=ROW_MS / FIXED_MS)


def test_prompt_piece_is_smallest_beside_more_chains_than_usual() -> None:
    more = (MIN_CHUNK_TOKENS + 60 - 30) * ROW_MS / (FIXED_MS + ROW_MS * 30)
    assert relative_delay(60, usual=30) == pytest.approx(more)
