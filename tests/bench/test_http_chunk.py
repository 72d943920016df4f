"""The CPU time of a chunk in the HTTP process: a side measures it, and two sides are compared text by text."""

from __future__ import annotations

import sys

import pytest

from outrider.orchestrator.pairing.model_files import PACKAGE_FOLDER
from tools.http_chunk import Costs, report, start_side


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the clock of another process")
def test_side_completes_and_measures_each_text() -> None:
    with start_side(PACKAGE_FOLDER.parent, {}) as helper:
        costs = [helper.ask({"tokens": 2, "gap_ms": 1.0, "chunks": chunks}) for chunks in (1, 5)]
    assert costs[0]["chunks"] == 1 and 1 <= costs[1]["chunks"] <= 5  # chunks that arrive together are sent together
    assert all(cost["cpu_ms"] > 0 for cost in costs)


def test_the_cost_of_a_request_is_divided_by_its_chunks() -> None:
    assert list(report("few", {"this": [(2.0, 4), (4.0, 8)]})) == ["few, this: 0.50 [0.50, 0.50] ms of CPU per chunk"]


def test_two_sides_are_compared_on_the_same_texts() -> None:
    sides: dict[str, Costs] = {"this": [(1.0, 4), (3.0, 4)], "the other": [(2.0, 4), (6.0, 4)]}
    assert list(report("many", sides))[-1] == "many, this / the other: 0.50 [0.50, 0.50]"
