"""Predictions follow the formula, statistics mean what they say, and a picture needs a trace."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.speedup import Costs, Odds, ar_rate, ceiling, sd_rate, ssd_rate
from orchestrator.core.trace import Trace
from orchestrator.study.forecast import best_of, forecasts, recommendation
from orchestrator.study.probe import Curve, Probe, Trial
from orchestrator.study.statistics import Timed, bootstrap, ratio, repeated_share
from orchestrator.study.timeline import draw, read
from protocol.errors import InvalidRequest
from protocol.messages import Span

FLAT = Costs(10.0, lambda rows: 10.0, lambda depth: 4.0, lambda depth: 9.0, 0.0)


def odds(tokens: float, hit: float) -> Odds:
    return Odds(lambda depth: tokens, hit)


def test_with_every_lookup_a_hit_and_drafting_hidden_ssd_reaches_its_ceiling() -> None:
    """Corollary of theorem 7: SSD over SD is 1 + T_SD."""
    certain = odds(3.0, 1.0)
    assert ssd_rate(FLAT, certain, 3) / sd_rate(FLAT, certain, 3) == pytest.approx(ceiling(FLAT, 3))


def test_with_no_hit_ssd_is_no_worse_than_sd() -> None:
    never = odds(3.0, 0.0)
    assert ssd_rate(FLAT, never, 3) >= sd_rate(FLAT, never, 3) * 0.999


@pytest.mark.parametrize("hit", [0.1, 0.5, 0.9])
def test_more_hits_are_more_tokens(hit: float) -> None:
    assert ssd_rate(FLAT, odds(3.0, hit + 0.05), 3) > ssd_rate(FLAT, odds(3.0, hit), 3)


def test_turnaround_costs_speculation_and_not_plain_decoding() -> None:
    slow = replace(FLAT, turnaround_ms=5.0)
    assert ar_rate(slow) == ar_rate(FLAT)
    assert ssd_rate(slow, odds(3.0, 0.9), 3) < ssd_rate(FLAT, odds(3.0, 0.9), 3)


def probe_of(verify: Curve, tokens: int) -> Probe:
    trial = Trial(3, 8, (tokens,) * 10, (True,) * 9 + (False,))
    return Probe(10.0, verify, Curve(((1, 2.0), (3, 6.0))), Curve(((4, 2.5), (8, 3.0))), 0.2, (trial,))


def test_where_a_row_costs_as_much_as_a_token_the_advice_is_to_leave_it() -> None:
    linear = Curve(((1, 10.0), (4, 40.0)))
    assert recommendation(forecasts(probe_of(linear, 2), 0.3)).mode == "ar"


def test_where_rows_are_cheap_and_drafts_hold_the_advice_is_ssd() -> None:
    flat = Curve(((1, 10.0), (4, 12.5)))
    found = forecasts(probe_of(flat, 2), 0.3)
    assert recommendation(found).mode == "ssd"
    sd, ssd = best_of(found, "sd"), best_of(found, "ssd")
    assert sd is not None
    assert ssd is not None
    assert ssd.tokens_per_second > sd.tokens_per_second


def test_a_curve_goes_through_its_points_and_straight_on() -> None:
    curve = Curve(((1, 10.0), (4, 13.0), (8, 21.0)))
    assert [curve(1), curve(4), curve(6), curve(12)] == [10.0, 13.0, 17.0, 29.0]


def test_acceptance_is_of_the_rounds_that_came_so_far() -> None:
    trial = Trial(3, 8, (0, 1, 3, 3), (True, False, True, True))
    assert [trial.acceptance(i) for i in range(3)] == [0.75, pytest.approx(2 / 3), 1.0]
    assert trial.hit_rate == 0.75
    assert trial.tokens == 2.75


def test_a_ratio_is_of_all_tokens_over_all_time_and_its_interval_holds_it() -> None:
    rng = random.Random(0)
    theirs = [Timed(100, rng.uniform(0.9, 1.1)) for _ in range(30)]
    ours = [Timed(100, run.seconds / 1.5) for run in theirs]
    found = ratio(ours, theirs)
    assert found.value == pytest.approx(1.5)
    assert found.low <= 1.5 + 1e-9
    assert found.high >= 1.5 - 1e-9


def test_the_interval_of_a_mean_covers_it_about_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(60):
        values = [rng.gauss(0.0, 1.0) for _ in range(30)]
        interval = bootstrap(values, lambda found: sum(found) / len(found))
        covered += interval.low <= 0.0 <= interval.high
    assert 48 <= covered <= 60


def test_a_looping_text_is_seen() -> None:
    assert repeated_share([1, 2, 3, 4] * 20) > 0.9
    assert repeated_share(list(range(80))) == 0.0


def traced(path: Path) -> None:
    trace = Trace(path)
    for number in range(1, 20):
        start = number * 12_000_000
        trace.add("target", "verify 4", Span(start, start + 10_000_000), round=number, accepted=2)
        trace.add("draft-0", "depth 1", Span(start, start + 4_000_000), round=number, rows=8)
        trace.mark("orchestrator", "hit" if number % 3 else "miss", start, round=number, chain=3)
    trace.close()


def test_a_trace_opens_in_perfetto_and_draws(tmp_path: Path) -> None:
    traced(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    draw(read(tmp_path / "trace.json"), tmp_path / "rounds.png", "test", 3, 10)
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_rounds_that_are_not_there_cannot_be_drawn(tmp_path: Path) -> None:
    traced(tmp_path / "trace.json")
    with pytest.raises(InvalidRequest, match="no rounds 50"):
        draw(read(tmp_path / "trace.json"), tmp_path / "rounds.png", "test", 50, 10)


@pytest.mark.parametrize("content", ["", "{}", '{"traceEvents": 3}', '{"traceEvents": [{"ph": "M"}]}'])
def test_what_is_no_trace_is_one_sentence(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match="no trace"):
        read(path)


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be written"):
        Trace(tmp_path / "missing" / "trace.json")
