"""What a chunk costs HTTP: the side that is measured answers, and one side is held over the other text by text."""

from __future__ import annotations

import sys

import pytest

from outrider.orchestrator.pairing.model_files import PACKAGE
from tools.http_chunk import Costs, side, told


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the clock of another process")
def test_each_text_comes_to_its_end_and_has_its_cost() -> None:
    with side(PACKAGE.parent, {}) as helper:
        costs = [helper.ask({"tokens": 2, "gap_ms": 1.0, "chunks": chunks}) for chunks in (1, 5)]
    assert costs[0]["chunks"] == 1 and 1 <= costs[1]["chunks"] <= 5  # chunks that come together leave together
    assert all(cost["cpu_ms"] > 0 for cost in costs)


def test_a_request_costs_what_its_chunks_share() -> None:
    assert list(told("few", {"this": [(2.0, 4), (4.0, 8)]})) == ["few, this: 0.50 [0.50, 0.50] ms of CPU a chunk"]


def test_one_side_is_held_over_the_other_on_the_same_texts() -> None:
    sides: dict[str, Costs] = {"this": [(1.0, 4), (3.0, 4)], "the other": [(2.0, 4), (6.0, 4)]}
    assert list(told("many", sides))[-1] == "many, this / the other: 0.50 [0.50, 0.50]"
