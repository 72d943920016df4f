"""A breakdown assigns every millisecond between two outcomes to one named part."""

from __future__ import annotations

import pytest

from outrider.bench.trace import Bar, breakdown, table
from outrider.protocol.errors import InvalidRequest


def verify(number: int, start: float, length: float = 10.0) -> Bar:
    return Bar("target", "verify 4", start, length, number, {"accepted": 2})


def mark(number: int, name: str) -> Bar:
    return Bar("orchestrator", name, 0.0, 0.0, number, {})


def draft(number: int, start: float, length: float) -> Bar:
    return Bar("draft-0", "depth 1", start, length, number, {})


BARS = [
    verify(1, 0.0),
    verify(2, 10.5),
    mark(2, "hit"),
    verify(3, 22.5),
    mark(3, "drafter"),
    verify(4, 33.5),
    mark(4, "miss"),
    verify(5, 43.6),
    mark(5, "late"),
    draft(2, 11.0, 2.0),
    draft(2, 14.0, 3.0),
    draft(3, 21.0, 3.0),
]


def test_breakdown_parts_add_up_to_the_time_between_outcomes() -> None:
    found = breakdown(BARS, 1)
    assert (found.rounds, found.verify) == (4, 10.0)
    assert found.turnaround == pytest.approx(0.5 / 4)
    assert found.waiting == pytest.approx((2.0 + 0.1) / 4)
    assert found.fallback == pytest.approx(1.0 / 4)
    assert found.total == pytest.approx((53.6 - 10.0) / 4)
    assert found.commit == pytest.approx((1.0 + 0.5) / 2)
    assert found.work_ahead == pytest.approx(8.0 / 4)


def test_breakdown_can_skip_the_first_rounds() -> None:
    assert breakdown(BARS, 4).rounds == 1


def test_breakdown_of_a_single_round_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="generate more tokens"):
        breakdown(BARS, 5)


def test_the_table_has_a_line_for_each_part() -> None:
    assert [line.split("  ")[1].strip() for line in table(breakdown(BARS, 1)).splitlines()[1:]] == [
        "verify", "turnaround", "wait for drafter", "fallback", "round", "commit", "work ahead",
    ]  # fmt: skip
