"""What a drafter could bring at most: of its chains' lengths and trees' sizes the one that brings most for its time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.bench.bound import best
from outrider.bench.tree_rounds import Way
from outrider.protocol.profile import Latency

COSTS = Latency(((1, 10.0), (11, 20.0)))  # a row more takes a millisecond
SHORT, LONG = replace(Way("head"), depth=1, most=1), replace(Way("head"), depth=5, most=5)
FOUND = {SHORT: (1.6, 2.0), LONG: (2.4, 6.0)}


def test_free_drafts_are_as_long_as_rows_allow() -> None:
    found = best(FOUND, COSTS, 0.0)
    assert found.depth == 5
    assert found.gain == pytest.approx(2.4 * 10 / 15)


def test_what_drafting_takes_is_counted_token_by_token() -> None:
    found = best(FOUND, COSTS, 3.0)
    assert found.depth == 1
    assert found.gain == pytest.approx(1.6 * 10 / (11 + 3))
