"""A forecast follows the probe: what a verify takes beside the drafter, what the rehearsals' rounds brought."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.bench.timing.curve import Curve
from outrider.bench.timing.forecast import Forecast, best_of, forecasts, most_gained, recommendation, slowdown
from outrider.bench.timing.probe import Probe
from outrider.bench.timing.rehearsal import Rehearsal, Rehearsed, agreeing

FLAT = Curve(((1, 10.0), (4, 12.5)))


def probe_of(verify: Curve, accepted: int, beside: float = 1.0) -> Probe:
    """K = 3, B = 8, nine hits in ten rounds; a verify beside the drafter takes `beside` times as long as alone."""
    rounds = tuple(Rehearsed(4, accepted, accepted, number > 0, beside * verify(4)) for number in range(10))
    turn = Curve(((3, verify(4) + 6.0),))
    return Probe(
        10.0,
        verify,
        Curve(((1, 2.0), (3, 5.0))),
        Curve(((4, 2.5), (8, 3.0))),
        0.2,
        turn,
        0.0,
        (Rehearsal(3, 8, rounds),),
    )


def speed(found: list[Forecast], mode: str) -> float:
    best = best_of(found, mode)
    return best.tokens_per_second if best is not None else 0.0


def test_where_a_row_costs_as_much_as_a_token_the_advice_is_to_leave_it() -> None:
    linear = Curve(((1, 10.0), (4, 40.0)))
    assert recommendation(forecasts(probe_of(linear, 2), 0.3)).mode == "ar"


def test_where_rows_are_cheap_and_drafts_hold_the_advice_is_ssd() -> None:
    found = forecasts(probe_of(FLAT, 2), 0.3)
    assert recommendation(found).mode == "ssd"
    assert speed(found, "ssd") > speed(found, "sd")


def test_sd_takes_its_whole_round_in_turn() -> None:
    assert speed(forecasts(probe_of(FLAT, 2), 0.3), "sd") == pytest.approx(1000 * 3 / 18.5)
    assert most_gained(probe_of(FLAT, 2), 3) == pytest.approx(18.5 / 12.5)


def test_ssd_takes_the_verify_as_it_is_beside_the_drafter_and_sd_does_not() -> None:
    alone, beside = forecasts(probe_of(FLAT, 2), 0.0), forecasts(probe_of(FLAT, 2, 1.2), 0.0)
    assert speed(alone, "sd") == speed(beside, "sd")
    # Nine hits of 15 ms; after the miss 15 ms more for asking: 5 for the chain, 0.2 for the link, half a depth.
    assert speed(beside, "ssd") == pytest.approx(1000 * 3 / (15.0 + 0.1 * (5.0 + 0.2 + 1.5)))
    assert slowdown(probe_of(FLAT, 2, 1.2), probe_of(FLAT, 2, 1.2).rehearsals[0]) == pytest.approx(1.2)
    assert "1.20 times what it takes alone" in next(f.limit for f in beside if f.mode == "ssd")


def test_chains_cut_short_cost_ssd_tokens_and_not_sd() -> None:
    whole = probe_of(FLAT, 3)
    cut = tuple(replace(tried, rows=3, accepted=2) for tried in whole.rehearsals[0].rounds)
    short = forecasts(replace(whole, rehearsals=(Rehearsal(3, 8, cut),)), 0.3)
    assert speed(short, "sd") == speed(forecasts(whole, 0.3), "sd")
    assert speed(short, "ssd") < speed(forecasts(whole, 0.3), "ssd")


def test_a_curve_goes_through_its_points_and_straight_on() -> None:
    curve = Curve(((1, 10.0), (4, 13.0), (8, 21.0)))
    assert [curve(1), curve(4), curve(6), curve(12)] == [10.0, 13.0, 17.0, 29.0]
    assert Curve(((3, 5.0),))(7) == 5.0


def test_acceptance_is_of_the_rounds_that_came_so_far() -> None:
    rounds = tuple(Rehearsed(4, held, held, held != 1, 10.0) for held in (0, 1, 3, 3))
    rehearsal = Rehearsal(3, 8, rounds)
    assert [rehearsal.acceptance(i) for i in range(3)] == [0.75, pytest.approx(2 / 3), 1.0]
    assert rehearsal.hit_rate == 0.75
    assert rehearsal.tokens == 2.75


@pytest.mark.parametrize(("chain", "held"), [((1, 2, 3), 3), ((1, 9, 3), 1), ((9,), 0), ((), 0)])
def test_a_chain_holds_as_far_as_it_is_the_text(chain: tuple[int, ...], held: int) -> None:
    assert agreeing(chain, [1, 2, 3, 4]) == held
