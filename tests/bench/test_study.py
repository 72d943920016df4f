"""Predicted rates follow the formula, statistics match their definitions, and pictures and traces are complete."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from outrider.bench.commands import files
from outrider.bench.commands.overlap import describe, draw_rounds
from outrider.bench.comparison.runs import Timed, bootstrap, hit_turnarounds, ratio, repeated_share
from outrider.orchestrator.cli import main
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.core.metrics import TARGET_DRAFTER_TRACK, TARGET_TRACK, Trace
from outrider.orchestrator.core.policy.forecasts import (
    Costs,
    Odds,
    RoundKind,
    ar_rate,
    mixed_rate,
    round_ms,
    sd_rate,
    ssd_rate,
)
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import DraftWork, RoundRecord, Span
from outrider.protocol.version import install_command
from tools import picture
from tools.formula import speedup_bound
from tools.overlap_timing import Overlap, format_table, measure

FLAT = Costs(10.0, lambda rows: 10.0, lambda depth: 4.0, lambda depth: 9.0, 0.0)


def odds(tokens: float, hit: float) -> Odds:
    return Odds(lambda depth: tokens, hit)


def test_ssd_reaches_its_ceiling_with_all_hits_and_hidden_drafting() -> None:
    """Corollary of theorem 7: SSD over SD is 1 + T_SD."""
    certain = odds(3.0, 1.0)
    assert ssd_rate(FLAT, certain, 3) / sd_rate(FLAT, certain, 3) == pytest.approx(speedup_bound(FLAT, 3))


def test_ssd_without_hits_is_no_slower_than_sd() -> None:
    never = odds(3.0, 0.0)
    assert ssd_rate(FLAT, never, 3) >= sd_rate(FLAT, never, 3) * 0.999


@pytest.mark.parametrize("hit", [0.1, 0.5, 0.9])
def test_predicted_ssd_rate_grows_with_the_hit_rate(hit: float) -> None:
    assert ssd_rate(FLAT, odds(3.0, hit + 0.05), 3) > ssd_rate(FLAT, odds(3.0, hit), 3)


def test_turnaround_slows_ssd_but_not_plain_decoding() -> None:
    slow = replace(FLAT, turnaround_ms=5.0)
    assert ar_rate(slow) == ar_rate(FLAT)
    assert ssd_rate(slow, odds(3.0, 0.9), 3) < ssd_rate(FLAT, odds(3.0, 0.9), 3)


def test_mixed_rate_is_total_tokens_over_total_time() -> None:
    """Theorem 7 by term: a hit of 10 ms, a chain on request (4 ms more), a tree that takes longer than the verify."""
    slow = replace(FLAT, tree_ms=lambda depth: 4.0 * depth, turnaround_ms=1.0)
    hit, requested, late = (
        RoundKind(0.5, 4, 3.0, ahead=2),
        RoundKind(0.3, 4, 3.0, requested=3),
        RoundKind(0.2, 4, 2.0, ahead=3),
    )
    assert [round_ms(slow, kind) for kind in (hit, requested, late)] == [11.0, 15.0, 13.0]
    assert mixed_rate(slow, [hit, requested, late]) == pytest.approx((0.8 * 3.0 + 0.2 * 2.0) / (5.5 + 4.5 + 2.6))


@pytest.mark.parametrize(("hit", "turnaround_ms"), [(0.0, 0.0), (0.6, 0.4), (1.0, 2.0)])
def test_ssd_rate_is_the_mixed_rate_of_hits_and_misses(hit: float, turnaround_ms: float) -> None:
    costs = replace(FLAT, turnaround_ms=turnaround_ms)
    found = ssd_rate(costs, odds(3.0, hit), 3)
    kinds = [RoundKind(hit, 4, 3.0, ahead=3), RoundKind(1 - hit, 4, 3.0, requested=3)]
    assert found == pytest.approx(mixed_rate(costs, kinds))


def test_ratio_of_total_rates_is_within_its_interval() -> None:
    rng = random.Random(0)
    theirs = [Timed(100, rng.uniform(0.9, 1.1)) for _ in range(30)]
    ours = [Timed(100, run.seconds / 1.5) for run in theirs]
    found = ratio(ours, theirs)
    assert found.value == pytest.approx(1.5)
    assert found.low <= 1.5 + 1e-9
    assert found.high >= 1.5 - 1e-9
    found = ratio([Timed(0, 0.0), Timed(90, 1.0)], [Timed(0, 0.0), Timed(60, 1.0)])  # a text of one token
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.0, 1.5))


def test_bootstrap_interval_covers_the_mean_as_often_as_it_should() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(60):
        values = [rng.gauss(0.0, 1.0) for _ in range(30)]
        interval = bootstrap(values, lambda found: sum(found) / len(found))
        covered += interval.low <= 0.0 <= interval.high
    assert 48 <= covered <= 60


def test_repeated_share_detects_a_looping_text() -> None:
    assert repeated_share([1, 2, 3, 4] * 20) > 0.9
    assert repeated_share(list(range(80))) == 0.0


def write_trace(path: Path) -> None:
    trace = Trace(path)
    for number in range(1, 20):
        start = number * 12_000_000
        trace.add("target", "verify 4", Span(start, start + 10_000_000), round=number, accepted=2)
        trace.add("draft-0", "depth 1", Span(start, start + 4_000_000), round=number, rows=8)
        trace.add("orchestrator", "hit" if number % 3 else "miss", Span(start, start), round=number, chain=3)
    trace.close()


def record(number: int, lookup: str = "hit", source: str = "prepared", *drafting: DraftWork) -> RoundRecord:
    start = number * 12_000_000
    work = DraftWork("draft-0", number, 1, 8, Span(start, start + 4_000_000))
    return RoundRecord(number, lookup, source, 3, 2, 3, Span(start, start + 10_000_000), drafting=drafting or (work,))


def test_turnaround_is_the_wait_before_the_verify_of_a_hit_that_follows_directly() -> None:
    assert hit_turnarounds([record(1), record(2, "miss"), record(3), record(5), record(6, "grown")]) == [2.0]


def test_trace_has_perfetto_events(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(named.values()) == ["draft-0", "orchestrator", "target"]
    assert {named[event["pid"]] for event in events if event["name"].startswith("depth")} == {"draft-0"}


def test_rounds_are_drawn_to_a_file(tmp_path: Path) -> None:
    picture.save(draw_rounds(list(map(record, range(1, 20))), "test", 10), tmp_path / "rounds.png")
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")


def test_the_legend_has_the_colours_of_the_bars() -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_hex
    from matplotlib.patches import Patch

    kinds = [
        ("hit", "prepared"), ("late", "prepared"), ("miss", "target"), ("none", "copied"), ("miss", "drafted"),
        ("none", "head"), ("none", "target"), ("grown", "prepared"),
    ]  # fmt: skip
    rounds = []
    for at, (lookup, source) in enumerate(kinds, 1):
        work = DraftWork("draft-0", at, at, 0 if at == 8 else 8, Span(at * 12_000_000, at * 12_000_000 + 2_000_000))
        rounds.append(record(at, lookup, source, work))
    axes = draw_rounds(rounds, "test", 8).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    shown = {to_hex(patch.get_facecolor()) for patch in legend.findobj(Patch) if patch is not legend.get_frame()}
    painted = {to_hex(one.get_facecolor()[0]) for one in axes.collections if isinstance(one, PolyCollection)}
    assert len(painted) == 7 + 1 and painted <= shown  # a chain on request has one colour on both tracks


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], int]:
    """Returns a function that runs `outrider overlap --out PATH` with fixed results instead of measurements."""

    def fake_rounds(_options: Any, _prompt: str, trace: Path, _screen: Any) -> dict[str, list[RoundRecord]]:
        write_trace(trace)
        return {mode: list(map(record, range(1, 20))) for mode in ("ssd", "sd")}

    monkeypatch.setattr("outrider.bench.commands.overlap._run_rounds", fake_rounds)
    return lambda out: main(["overlap", "--out", str(out)])


@pytest.mark.parametrize(
    ("out", "picture", "trace"),
    [
        ("x.png", "x.png", "x.json"),
        ("x.JPG", "x.JPG", "x.json"),
        ("new/y.svg", "new/y.svg", "new/y.json"),
        ("v1.5", "v1.5/rounds.png", "v1.5/rounds.json"),
    ],
)
def test_overlap_writes_picture_and_trace_to_the_given_path(
    overlap: Callable[[Path], int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    out: str,
    picture: str,
    trace: str,
) -> None:
    assert overlap(tmp_path / out) == 0
    assert (tmp_path / picture).is_file() and (tmp_path / trace).is_file()
    captured = capsys.readouterr().out
    assert f"picture: {tmp_path / picture}" in captured and str(tmp_path / trace) in captured


def test_unwritable_picture_of_overlap_is_refused(
    overlap: Callable[[Path], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rounds.png").mkdir()
    assert overlap(tmp_path) == InvalidRequest.exit_code
    assert f"the picture can't be written to {tmp_path / 'rounds.png'}: Is a directory" in capsys.readouterr().err


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.protocol.version.find_spec", lambda name: None if name == "matplotlib" else object())


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_overlap_prints_its_table_and_a_note(
    overlap: Callable[[Path], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert overlap(tmp_path / "x.png") == 0
    captured = capsys.readouterr()
    assert "target busy" in captured.out and "ten rounds" not in captured.out
    assert (tmp_path / "x.json").is_file() and not (tmp_path / "x.png").exists()
    assert (
        captured.err
        == f"Note: no picture was drawn, because Matplotlib is not installed ({install_command('bench')}).\n"
    )


@pytest.mark.parametrize(("name", "why"), [("missing/x.png", "No such file"), ("x.doc", "not supported")])
def test_unwritable_picture_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"can't be written to .*{name}: .*{why}"):
        picture.save(draw_rounds([record(1)], "test", 1), tmp_path / name)


def test_results_are_written_with_a_description_of_the_machine(tmp_path: Path) -> None:
    files.write_results(tmp_path / "bench.json", ServeSettings(), {"runs": []})
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["runs"] == [] and found["machine"]["versions"]["numpy"]
    with pytest.raises(InvalidRequest, match="can't be written to"):
        files.write_results(tmp_path / "missing" / "bench.json", ServeSettings(), {})


def test_overlap_is_described_by_rounds_of_ssd_and_of_sd() -> None:
    """The verifies of SD take 8 ms, those of SSD 10 of 12 ms; of the 4 ms of drafting, 3 are during a verify."""

    def drafted(number: int) -> RoundRecord:
        start = number * 12_000_000
        return record(
            number, "hit", "prepared", DraftWork("draft-0", number, 1, 8, Span(start - 1_000_000, start + 3_000_000))
        )

    alone = [structs.replace(record(n), verify=Span(0, 8_000_000)) for n in range(1, 20)]
    lines = describe([drafted(n) for n in range(1, 7)], alone).splitlines()
    assert [line.split()[1] for line in lines[1:3]] == ["10.00", "4.00"]
    assert "1.25 times as long as in SD" in lines[1] and "75% of it during verifies" in lines[2]
    assert lines[3] == "  target busy for 86% of the time"  # 6 times 10 of 70 ms


def test_a_text_without_rounds_has_no_overlap_to_describe() -> None:
    with pytest.raises(InvalidRequest, match="no rounds from 8 on; expected a longer context"):
        describe([], [record(1)])


def test_unwritable_trace_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="can't be written"):
        Trace(tmp_path / "missing" / "trace.json")


def test_in_process_drafter_has_its_own_track_in_the_targets_process(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "trace.json")
    trace.add(TARGET_TRACK, "verify 4", Span(5, 9), round=1, accepted=2)
    trace.add(TARGET_DRAFTER_TRACK, "chain", Span(1, 5), round=1)
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    work = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    assert [tracks[event["tid"]] for event in work] == [TARGET_DRAFTER_TRACK, TARGET_TRACK]


@pytest.mark.parametrize(("both", "word"), [(9.0, "Above 1"), (10.0, ""), (15.0, ""), (21.0, "Below 0")])
def test_overlap_efficiency_outside_zero_to_one_is_explained(both: float, word: str) -> None:
    found = format_table(Overlap(9, 4, 16, 10.0, 6.0, both, 10.0, 6.0))
    assert ("Above 1" in found, "Below 0" in found) == (word == "Above 1", word == "Below 0")


def test_rounds_beyond_a_models_context_cannot_be_timed() -> None:
    with pytest.raises(InvalidRequest, match="tokens, and the context is 1024; expected fewer rounds"):
        measure(choose_pair(ServeSettings(model="tiny")), 1000, Screen())
