"""A breakdown assigns every millisecond between two outcomes to one named part."""

from __future__ import annotations

import pytest

from outrider.bench.commands.overlap import compute_breakdown, format_breakdown
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import DraftWork, RoundRecord, Span


def span(start_ms: float, length_ms: float) -> Span:
    return Span(round(start_ms * 1e6), round((start_ms + length_ms) * 1e6))


def verified(number: int, start_ms: float, lookup: str, source: str, *drafting: DraftWork) -> RoundRecord:
    return RoundRecord(number, lookup, source, 3, 2, 3, span(start_ms, 10.0), drafting=drafting)


def drafted(number: int, start_ms: float, length_ms: float) -> DraftWork:
    return DraftWork("draft-0", number, 1, 8, span(start_ms, length_ms))


# Drafting is reported with the round under way when it arrived.
ROUNDS = [
    verified(1, 0.0, "none", "none"),
    verified(2, 10.5, "hit", "cache", drafted(2, 11.0, 2.0), drafted(2, 14.0, 3.0)),
    verified(3, 22.5, "miss", "drafter"),
    verified(4, 33.5, "miss", "none", drafted(3, 21.0, 3.0)),
    verified(5, 43.6, "late", "cache"),
]


def test_breakdown_parts_add_up_to_the_time_between_outcomes() -> None:
    rounds, means = compute_breakdown(ROUNDS, 1)
    assert (rounds, means["verify"]) == (4, 10.0)
    assert means["turnaround"] == pytest.approx(0.5 / 4)
    assert means["wait for drafter"] == pytest.approx((2.0 + 0.1) / 4)
    assert means["fallback"] == pytest.approx(1.0 / 4)
    assert means["round"] == pytest.approx((53.6 - 10.0) / 4)
    assert sum(list(means.values())[:4]) == pytest.approx(means["round"])
    assert means["commit"] == pytest.approx((1.0 + 0.5) / 2)
    assert means["work ahead"] == pytest.approx(8.0 / 4)


def test_breakdown_can_skip_the_first_rounds() -> None:
    rounds, _ = compute_breakdown(ROUNDS, 4)
    assert rounds == 1


def test_breakdown_of_a_single_round_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="generate more tokens"):
        compute_breakdown(ROUNDS, 5)


def test_the_table_has_a_line_for_each_part() -> None:
    lines = format_breakdown(*compute_breakdown(ROUNDS, 1)).splitlines()[1:]
    assert [line.split("  ")[1].strip() for line in lines] == [
        "verify", "turnaround", "wait for drafter", "fallback", "round", "commit", "work ahead",
    ]  # fmt: skip
