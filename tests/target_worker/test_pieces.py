"""How much of a newcomer's prompt is read beside others: a share of their forward, a smaller one beside chains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.target_worker.batch import READING_SHARE, READING_SHARE_BESIDE_CHAINS, Batch

DECODING, FIXED_MS, ROW_MS = 8, 10.0, 0.5


def lengthened(rows: int) -> float:
    """By what share of it a forward over so many rows takes longer for the newcomer's piece."""
    batch = Batch(None)
    for seen in (8, 16, 32, 64):
        batch._cost.add(seen, FIXED_MS + ROW_MS * seen)
    batch._last_piece = 1000
    others = [SimpleNamespace(reads=False, over=False, unread=0) for _ in range(DECODING)]
    newcomer = SimpleNamespace(reads=True, over=False, unread=900, slot=None)
    ((_, reading),) = batch._readings(cast(Any, [*others, newcomer]), rows)
    return reading.count * ROW_MS / (FIXED_MS + ROW_MS * rows)


@pytest.mark.parametrize(("rows", "share"), [(8, READING_SHARE), (60, READING_SHARE_BESIDE_CHAINS)])
def test_a_newcomers_piece_lengthens_a_forward_by_a_share_of_it_and_less_beside_chains(rows: int, share: float) -> None:
    assert lengthened(rows) == pytest.approx(max(share, 16 * ROW_MS / (FIXED_MS + ROW_MS * rows)), rel=0.1)
