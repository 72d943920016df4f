"""Comparing two checkouts: runs, the printed line, and a folder that is not a checkout."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from outrider.bench.comparison.runs import Run, Timed, run_interleaved
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams
from tools.versions import Side, report, require_checkout


class Echo:
    """Answers every request with its prompt, at 20 ms per token."""

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["mode"] == "ssd" and asked["seed"] == 3
        return {"tokens": asked["tokens"], "decode_ms": 20 * (len(asked["tokens"]) - 1)}


def test_a_side_returns_tokens_and_decoding_time() -> None:
    found = Side(Echo(), "ssd")((1, 2, 3), SamplingParams(seed=3))  # type: ignore[arg-type]
    assert (found.tokens, found.timed) == ((1, 2, 3), Timed(2, 0.04))


def test_the_ratio_is_this_checkout_over_the_other() -> None:
    ours = [Run((1, 2), Timed(10, 0.1)), Run((3,), Timed(10, 0.1))]
    theirs = [Run((1, 2), Timed(10, 0.2)), Run((4,), Timed(10, 0.2))]
    line = report("auto", 0.8, ours, theirs)
    assert "auto 2.00 [2.00, 2.00]   100.0 / 50.0 tokens/s, 1 of 2 texts equal" in line


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="expected the root of a checkout"):
        require_checkout(tmp_path)


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_each_of_two_runners_is_first_equally_often(count: int) -> None:
    """Otherwise an effect of the first run on the second, such as a warm cache, would bias their ratio."""
    ran: list[list[str]] = [[] for _ in range(24)]
    names = [str(n) for n in range(count)]
    runners = {name: lambda task, sampling, name=name: ran[task].append(name) for name in names}
    run_interleaved(runners, range(24), SamplingParams(), lambda step: None)  # type: ignore[arg-type]
    for left, right in combinations(names, 2):
        assert sum(order.index(left) < order.index(right) for order in ran) == len(ran) // 2
    assert {order[0] for order in ran} == set(names)
