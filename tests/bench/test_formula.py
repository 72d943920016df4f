"""The comparison of a run with the formula, which uses times in isolation and the run's own mix of rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from outrider.bench.comparison.report import describe_round
from outrider.bench.comparison.runs import summarize
from outrider.protocol.messages import Timings
from tools.formula import (
    FormulaComparison,
    IsolatedTimes,
    compare_plain,
    compare_speculative,
    describe,
    format_comparison,
    round_kinds,
    summarize_timings,
)
from tools.latency import Latency

VERIFY = Latency(((1, 10.0), (2, 11.0), (3, 12.0), (4, 13.0)))
ISOLATED = IsolatedTimes(10.0, VERIFY, Latency(((1, 3.0), (3, 5.0))), Latency(((1, 4.0), (3, 8.0))), 0.5)
# 20 rounds and the prompt's: 2 without a chain, 8 with two tokens, 10 with three. 5 chains were requested; 18 lookups.
SSD = Timings(
    predicted_n=51,
    rounds=21,
    predicted_ms=2 * 10.0 + 8 * 12.0 + 10 * 13.0 + 5 * 5.0 + 20 * 0.4,
    verify_ms=2 * 10.0 + 8 * 12.0 + 10 * 13.0,
    idle_ms=5 * 5.0 + 20 * 0.4,
    draft_waits=5,
    drafted_by_position=(18, 18, 10),
    accepted_by_position=(15, 10, 5),
    looked_up_by_accepted=(8, 5, 5),
    hits_by_accepted=(4, 5, 4),
)


def test_rounds_are_counted_by_the_rows_they_verified() -> None:
    run, found = summarize_timings([SSD, SSD], 0.4), summarize([SSD, SSD])
    assert (run.found, run.rows) == (found, (0, 4, 0, 16, 20))
    assert (found.rounds, found.tokens) == (40, 100)
    sums = found.sums
    assert (sums.looked_up_by_accepted, sums.hits_by_accepted, sums.draft_waits) == ((16, 10, 10), (8, 10, 8), 10)


def test_shares_of_round_kinds_add_up_to_one() -> None:
    kinds = round_kinds(summarize_timings([SSD], 0.4), 3, works_ahead=True)
    assert sum(kind.share for kind in kinds) == pytest.approx(1.0)
    assert {(kind.rows, kind.ahead) for kind in kinds if not kind.requested} == {(1, 0), (3, 2), (4, 3)}
    assert sum(kind.share for kind in kinds if kind.requested) == pytest.approx(5 / 20)
    assert {(kind.rows, kind.ahead) for kind in round_kinds(summarize_timings([SSD], 0.4), 2, works_ahead=True)} >= {
        (4, 0),
        (3, 2),
    }
    assert all(kind.ahead == 0 for kind in round_kinds(summarize_timings([SSD], 0.4), 3, works_ahead=False))


def test_run_at_isolated_times_reaches_the_predicted_rate() -> None:
    flat = replace(ISOLATED, chain_ms=Latency(((1, 5.0), (3, 5.0))), between_ms=0.4)
    assert compare_speculative(summarize_timings([SSD], 0.4), flat, 3, works_ahead=True).share == pytest.approx(1.0)


def test_slower_verifies_lower_the_share_of_the_prediction() -> None:
    slow = structs.replace(SSD, verify_ms=SSD.verify_ms * 1.1, predicted_ms=SSD.predicted_ms + SSD.verify_ms * 0.1)
    found = compare_speculative(summarize_timings([slow], 0.4), ISOLATED, 3, works_ahead=True)
    assert found.verify_ms / found.verify_alone_ms == pytest.approx(1.1)
    assert found.share < compare_speculative(summarize_timings([SSD], 0.4), ISOLATED, 3, works_ahead=True).share


def test_drafting_longer_than_the_verify_lowers_the_prediction() -> None:
    slow_drafter = replace(ISOLATED, ahead_ms=Latency(((1, 20.0), (3, 40.0))))
    found = summarize_timings([SSD], 0.4)
    assert (
        compare_speculative(found, slow_drafter, 3, works_ahead=True).predicted
        < compare_speculative(found, ISOLATED, 3, works_ahead=True).predicted
    )
    assert compare_speculative(found, slow_drafter, 3, works_ahead=False) == compare_speculative(
        found, ISOLATED, 3, works_ahead=False
    )


def test_plain_decoding_is_compared_with_its_isolated_step() -> None:
    plain = summarize_timings([Timings(predicted_n=11, rounds=11, predicted_ms=125.0, verify_ms=90.0)])
    assert compare_plain(plain, ISOLATED).share == pytest.approx(0.8)


def test_printed_lines_show_costs_ceiling_and_the_share_of_the_prediction() -> None:
    run = summarize_timings([SSD], 0.4)
    found = "\n".join(
        [*describe(ISOLATED, [3], 8), format_comparison("ssd K=3", run, compare_speculative(run, ISOLATED, 3, True))]
    )
    for words in (
        "10.00 ms times 1: 1.00, 2: 1.10, 3: 1.20, 4: 1.30",
        "K = 3, B = 8: work ahead 8.00 ms, T_p = 0.62",
        "T_SD = 0.38; upper bound of SSD over SD: 1.38x",
        "of the predicted",
        "a round of 13.95 ms = verify 12.30 (1.00 times the 12.30 in isolation) + between 1.65 (predicted",
    ):
        assert words in found


def test_notes_show_the_parts_of_a_round_and_shares_by_position() -> None:
    slower = structs.replace(SSD, predicted_ms=SSD.predicted_ms + 20)
    assert describe_round("ssd K=3", summarize([slower]), 80_000_000) == (
        "- a round of ssd K=3: 14.95 ms = verify 12.30 + target idle 1.65 + rest 1.00; 2.50 tokens, hit rate 72%;"
        " the verifies read 6.5 GB/s of target weights"
    )


def test_share_is_the_measured_over_the_predicted_rate() -> None:
    assert FormulaComparison(95.0, 100.0, 1.0, 1.0, 0.0, 0.0).share == 0.95
