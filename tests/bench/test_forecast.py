"""A forecast follows the probe: verify times while the drafter works, and the tokens of the rehearsals' rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench.commands import tune
from outrider.bench.timing.forecast import (
    Forecast,
    best_of,
    doubts,
    forecasts,
    recommendation,
    sd_ceiling,
    slowdown,
)
from outrider.bench.timing.loops import Curve
from outrider.bench.timing.probe import Probe, Rehearsal, RehearsalRound, agreeing
from outrider.orchestrator.cli import main
from outrider.orchestrator.settings import ServeSettings

FLAT = Curve(((1, 10.0), (4, 12.5)))


def probe_of(verify: Curve, accepted: int, slower: float = 1.0, plain_ms: float = 10.0) -> Probe:
    """K = 3, B = 8, nine hits in ten rounds; verifies take `slower` times as long while the drafter works."""
    rounds = tuple(RehearsalRound(4, accepted, accepted, number > 0, slower * verify(4)) for number in range(10))
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
        plain_ms,
    )


def test_measurements_of_an_idle_machine_raise_no_doubts() -> None:
    rising = Curve(((1, 10.0), (4, 40.0)))
    assert not any(doubts(probe_of(curve, 2, slower), 0.05) for curve in (FLAT, rising) for slower in (0.9, 1.0, 3.0))


@pytest.mark.parametrize(
    ("probe", "words"),
    [
        (probe_of(Curve(((1, 25.0), (4, 26.0))), 2), "of one token took 25.0 ms and a token of plain decoding 10.0 ms"),
        (probe_of(FLAT, 2, plain_ms=30.0), "and a token of plain decoding 30.0 ms"),
        (probe_of(Curve(((1, 19.0), (4, 12.0))), 2), "of one token took 19.0 ms and one of 4 tokens 12.0 ms"),
        (probe_of(FLAT, 2, 0.53), "a verify took 0.53 times as long while the drafter worked as alone"),
    ],
)
def test_contradicting_measurements_raise_doubts(probe: Probe, words: str) -> None:
    (doubt,) = doubts(probe, 0.05)
    assert words in doubt


def test_a_target_that_waits_for_a_cpu_raises_doubts() -> None:
    assert doubts(probe_of(FLAT, 2), 0.61) == ["the target waited for a CPU for 61% of its time"]


def test_tune_on_a_busy_machine_says_so_and_saves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tune, "_turnaround", lambda *_: 0.3)
    slower = 0.53
    monkeypatch.setattr(tune, "_probe", lambda *_: (probe_of(FLAT, 2, slower), 0.0))
    assert main(["tune"]) == 1
    said = capsys.readouterr().err
    assert "nothing was saved, because this machine was busy: a verify took 0.53 times as long" in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    slower = 1.0
    assert main(["tune"]) == 0 and [path for path in tmp_path.rglob("*") if path.is_file()]


def speed(found: list[Forecast], mode: str) -> float:
    best = best_of(found, mode)
    return best.tokens_per_second if best is not None else 0.0


def test_where_a_row_costs_as_much_as_a_token_ar_is_recommended() -> None:
    linear = Curve(((1, 10.0), (4, 40.0)))
    assert recommendation(forecasts(probe_of(linear, 2), 0.3)).mode == "ar"


def test_where_rows_are_cheap_and_drafts_are_accepted_ssd_is_recommended() -> None:
    found = forecasts(probe_of(FLAT, 2), 0.3)
    assert recommendation(found).mode == "ssd"
    assert speed(found, "ssd") > speed(found, "sd")


def test_sd_adds_the_times_of_draft_and_verify() -> None:
    assert speed(forecasts(probe_of(FLAT, 2), 0.3), "sd") == pytest.approx(1000 * 3 / 18.5)
    assert sd_ceiling(probe_of(FLAT, 2), 3) == pytest.approx(18.5 / 12.5)


def test_ssd_uses_the_verify_time_while_the_drafter_works_and_sd_does_not() -> None:
    alone, slower = forecasts(probe_of(FLAT, 2), 0.0), forecasts(probe_of(FLAT, 2, 1.2), 0.0)
    assert speed(alone, "sd") == speed(slower, "sd")
    # Nine hits of 15 ms; a miss adds a request: 5 ms for the chain, 0.2 for the link, half a drafter step.
    assert speed(slower, "ssd") == pytest.approx(1000 * 3 / (15.0 + 0.1 * (5.0 + 0.2 + 1.5)))
    assert slowdown(probe_of(FLAT, 2, 1.2), probe_of(FLAT, 2, 1.2).rehearsals[0]) == pytest.approx(1.2)
    assert "1.20 times that alone" in next(f.limit for f in slower if f.mode == "ssd")


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


def test_acceptance_at_a_position_counts_rounds_that_reached_it() -> None:
    rounds = tuple(RehearsalRound(4, held, held, held != 1, 10.0) for held in (0, 1, 3, 3))
    rehearsal = Rehearsal(3, 8, rounds)
    assert [rehearsal.acceptance(i) for i in range(3)] == [0.75, pytest.approx(2 / 3), 1.0]
    assert rehearsal.hit_rate == 0.75
    assert rehearsal.tokens == 2.75


@pytest.mark.parametrize(("chain", "held"), [((1, 2, 3), 3), ((1, 9, 3), 1), ((9,), 0), ((), 0)])
def test_a_chain_agrees_as_far_as_it_equals_the_text(chain: tuple[int, ...], held: int) -> None:
    assert agreeing(chain, [1, 2, 3, 4]) == held


def test_tune_names_other_devices_of_a_mac_for_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    (line,) = tune._other_devices(ServeSettings())
    assert "--draft-device cpu" in line and "--draft-backend coreml" in line
    assert tune._other_devices(ServeSettings(draft_device="cpu")) == []
    monkeypatch.setattr("sys.platform", "linux")
    assert tune._other_devices(ServeSettings()) == []
