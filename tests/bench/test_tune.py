"""`outrider tune`: what it measures of each arm and recommends, with a scripted server in virtual time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.commands import tune
from outrider.bench.comparison.arms import (
    BRANCHES,
    BUDGET_SECONDS,
    DEPTHS,
    PLAIN_ARM,
    WIDE_DEPTH,
    ArmCosts,
    list_arms,
    measure_arms,
)
from outrider.orchestrator.cli import main
from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import clock
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import DraftWork, RoundRecord, Span, Timings
from outrider.protocol.sampling import SamplingParams
from tools.latency import Latency

MS = 1_000_000
TEXTS = [(1, 2, 3), (4, 5), (6, 7, 8), (9,)]
WORKER = list_arms(True, ())


TURNAROUND_MS = 0.4


def curve(*points: tuple[int, float]) -> Latency:
    return Latency(points)


@dataclass
class Machine:
    """A server in virtual time.

    Drafting a token takes `step_ms`, and a token of all branches twice that. `right` has how many tokens of a chain are
    accepted, by drafter; other drafters draft nothing. A verify takes `slower` times as long while the drafter works.
    """

    verify: Latency = field(default_factory=lambda: curve((1, 10.0), (4, 12.5)))
    step_ms: float = 2.0
    right: dict[str, int] = field(default_factory=lambda: {"": 2})
    slower: float = 1.0
    hits: float = 1.0
    now_ns: int = 1
    texts: list[tuple[Any, Arm]] = field(default_factory=list)

    def stream(
        self, text: Any, sampling: SamplingParams, *, mode: str, num_draft_tokens: int | None, branches: int | None,
        drafter: str, **_: Any,
    ) -> Any:  # fmt: skip
        self.texts.append((text, Arm(mode, num_draft_tokens or 0, branches or 0, drafter)))
        depth = num_draft_tokens or 0 if drafter in self.right else 0
        accepted = min(self.right.get(drafter, 0), depth)
        count = max(sampling.max_tokens // (accepted + 1), 1)
        verify_ms = self.verify(depth + 1) * (self.slower if mode == "ssd" else 1.0)
        chain_ms = depth * self.step_ms if mode == "sd" else 0.0
        round_ms = verify_ms if mode == "ar" else verify_ms + chain_ms + (0.5 if not drafter else 0.0)
        self.now_ns += int(count * round_ms * MS)
        hits = round(count * self.hits) if mode == "ssd" else 0
        begins = [int(number * (verify_ms + TURNAROUND_MS) * MS) for number in range(count + 1)]
        records = [
            RoundRecord(
                number, "hit" if number <= hits else "none", "target", depth, accepted, accepted + 1,
                Span(begins[number], begins[number] + int(verify_ms * MS)), Span(0, int((chain_ms + 0.5) * MS)),
                tuple(self._drafting(number, mode, depth, branches or 0, drafter)),
            )
            for number in range(1, count + 1)
        ]  # fmt: skip
        timings = Timings(
            predicted_n=count * (accepted + 1) + 1, predicted_ms=count * round_ms, rounds=count + 1,
            predicted_per_second=1000 * (accepted + 1) / round_ms,
            accepted_by_position=tuple(count * (i < accepted) for i in range(depth)),
            drafted_by_position=(count,) * depth, looked_up_by_accepted=(count,) * (mode == "ssd"),
            hits_by_accepted=(hits,) * (mode == "ssd"),
        )  # fmt: skip
        return Stream((RoundRecord(0, "none", "target", 0, 0, 1, Span(0, 99 * MS)), *records), timings)

    def _drafting(self, number: int, mode: str, depth: int, branches: int, drafter: str) -> Iterator[DraftWork]:
        if mode == "sd" and depth:
            yield DraftWork(drafter or "draft-0", number, depth, 0, Span(0, int(depth * self.step_ms * MS)))
        for at in range(1, depth + 1) if mode == "ssd" else ():
            yield DraftWork("draft-0", number, at, branches, Span(0, int((9 if at == 1 else 2) * self.step_ms * MS)))


class Stream:
    def __init__(self, rounds: Sequence[RoundRecord], timings: Timings) -> None:
        self._rounds = rounds
        self.result = SimpleNamespace(timings=timings, notes=())

    def __iter__(self) -> Iterator[Any]:
        yield SimpleNamespace(rounds=self._rounds)


def measure(machine: Machine, arms: Sequence[Arm] = WORKER) -> ArmCosts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "now", lambda: machine.now_ns)
        client: Any = machine
        return measure_arms(client, arms, TEXTS, SamplingParams(), lambda _: None)


@pytest.mark.parametrize("factor", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("right", [0, 99])
def test_measuring_takes_about_a_minute_on_any_machine(factor: float, right: int) -> None:
    machine = Machine(curve((1, 10 * factor), (4, 12 * factor)), 4 * factor, {"": right})
    found = measure(machine)
    assert machine.now_ns / 1e9 < 1.5 * BUDGET_SECONDS
    assert set(found.arms) == set(WORKER) and found.arms[PLAIN_ARM].summary.runs == max(
        one.summary.runs for one in found.arms.values()
    )
    assert tune._recommend(found).endswith("recommended: --mode ar") is (right == 0)


def test_every_k_and_b_is_measured_in_turn() -> None:
    machine = Machine(curve((1, 1.0)), 0.1)
    measure(machine)
    assert {(arm.depth, arm.branches) for arm in WORKER if arm.mode == "ssd"} == {
        (k, b) for k in DEPTHS for b in BRANCHES
    }
    assert machine.texts[2:] == [(text, arm) for text in TEXTS for arm in WORKER]  # the first two warm up


def test_measured_costs_equal_those_of_the_scripted_rounds() -> None:
    found = measure(Machine())
    assert found.step_ms == pytest.approx(10.0)
    assert found.verify_ms == {rows: pytest.approx(Machine().verify(rows)) for rows in (1, 2, 3, 5, 7, 16)}
    assert list(found.verify_ms) == sorted(found.verify_ms)
    assert found.chain_ms == {k: pytest.approx(2 * k + 0.5) for k in (*DEPTHS, WIDE_DEPTH)}
    assert found.link_ms == pytest.approx(0.5)
    assert found.tree_ms == {b: pytest.approx(4.0) for b in BRANCHES}  # without each round's first
    assert found.turnaround_ms == pytest.approx(TURNAROUND_MS)
    assert measure(Machine(hits=0.0)).turnaround_ms == 0.3


def test_record_orders_arms_by_rate_and_has_acceptance_by_position() -> None:
    record = measure(Machine(hits=0.5)).record(0.8)
    assert [(one.mode, one.depth) for one in record.choices] == [("ssd", 2), ("sd", 2), ("ar", 0)]
    assert all(one.measured for one in record.choices)
    assert record.acceptance == (1.0, 1.0, 0.0)
    assert (record.draft_ms, record.depth_ms, round(record.hit_rate, 1), record.temp) == (2.0, 4.0, 0.5, 0.8)


def test_ar_is_recommended_when_a_row_costs_as_much_as_a_token() -> None:
    found = measure(Machine(curve((1, 10.0), (4, 40.0))))
    assert tune._recommend(found) == "speculation does not pay; recommended: --mode ar"


def test_ssd_is_recommended_when_rows_are_cheap_and_drafts_accepted() -> None:
    recommended = tune._recommend(measure(Machine()))
    assert recommended.startswith("recommended: --mode ssd --num-draft-tokens 2 --branches ")


def test_printed_lines_show_what_decides_the_rate_of_each_mode() -> None:
    found = measure(Machine(slower=1.2))
    ssd, sd, plain = (tune._format_arm(found.of(mode)[0]) for mode in ("ssd", "sd", "ar"))
    assert "3.00 tokens per round, verify 14.0 ms, 100% of drafted tokens accepted, hit rate 100%" in ssd
    assert "3.00 tokens per round, verify 11.7 ms" in sd and sd.endswith(", 2.00 ms per token of a chain")
    assert plain.endswith(" 100.0 tok/s   1.00 tokens per round, verify 10.0 ms")


def test_curve_interpolates_and_extrapolates_linearly() -> None:
    points = curve((1, 10.0), (4, 13.0), (8, 21.0))
    assert [points(1), points(4), points(6), points(12)] == [10.0, 13.0, 17.0, 29.0]
    assert curve((3, 5.0))(7) == 5.0


HEADS = {"eagle3": 2, "mtp": 0}


def test_each_heads_best_depth_and_costs_are_found() -> None:
    found = measure(Machine(curve((1, 10.0)), right=HEADS), list_arms(False, ("eagle3", "mtp", "silent")))
    assert [(best.arm.drafter, best.arm.depth) for best in found.best_arms()] == [("eagle3", 2), ("", 0), ("mtp", 1)]
    assert found.best_arms()[0].rate == pytest.approx(1000 * 3 / 14)
    assert (found.known("eagle3").step_ms, found.known("eagle3").acceptance) == (2.0, (1.0, 1.0, 0.0))
    assert found.known("mtp").acceptance == (0.0,)


@pytest.mark.parametrize("more", [{}, {"drafters": 2}, {"draft_prefill": "coreml"}])
def test_prefill_is_measured_without_the_drafters_settings(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def cluster(progress: Any, **settings: Any) -> Any:
        started.append(ServeSettings(**settings))
        timings = Timings(prompt_ms=100.0 / (1 + started[-1].prefill_workers))
        return nullcontext(
            SimpleNamespace(client=lambda: SimpleNamespace(generate=lambda *_: SimpleNamespace(timings=timings)))
        )

    monkeypatch.setattr(tune, "LocalCluster", cluster)
    target: Any = SimpleNamespace(context_length=100, vocab_size=8)
    given = {"model": "m", "draft_model": "d", "prefill_workers": 1, **more}
    least, sentence = tune.measure_prefill(given, target, lambda _: None)
    assert [settings.prefill_workers for settings in started] == [0, 1] and least == 64 and "at least 64" in sentence


@pytest.mark.parametrize(
    ("backend", "notes", "why"),
    [
        ("mtp", ("drafter mtp is not used: it is too wide",), "drafter mtp is not used: it is too wide"),
        ("mtp", (), "all chains were empty"),
        ("mlx", ("no draft model: it can't draft",), "no draft model: it can't draft"),
    ],
)
def test_tune_says_why_nothing_was_drafted(
    backend: str,
    notes: tuple[str, ...],
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = SimpleNamespace(role="target", pid=os.getpid())
    client = SimpleNamespace(stats=lambda: SimpleNamespace(workers=[target]))
    cluster = SimpleNamespace(notes=notes, client=lambda: client)
    monkeypatch.setattr(tune, "LocalCluster", lambda **_: nullcontext(cluster))
    silent = measure(Machine(right={}), list_arms(backend == "mlx", ("mtp",) if backend == "mtp" else ()))
    monkeypatch.setattr(tune, "measure_arms", lambda *_: silent)
    assert main(["tune", "--draft-backend", backend]) == WorkerError.exit_code
    assert f"nothing was drafted: {why}" in capsys.readouterr().err


def test_tune_saves_nothing_if_the_target_was_restarted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = SimpleNamespace(role="target", pid=os.getpid())
    client = SimpleNamespace(stats=lambda: SimpleNamespace(workers=[target]))
    cluster = SimpleNamespace(notes=(), client=lambda: client)
    monkeypatch.setattr(tune, "LocalCluster", lambda **_: nullcontext(cluster))

    def restarted(*_: object) -> ArmCosts:
        target.pid = 2**22 + 1  # higher than every process id
        return measure(Machine())

    monkeypatch.setattr(tune, "measure_arms", restarted)
    assert main(["tune"]) == WorkerError.exit_code
    assert "the target was restarted meanwhile; run it again" in capsys.readouterr().err


def test_a_head_is_measured_though_the_draft_worker_drafts_nothing() -> None:
    found = measure(Machine(right={"eagle3": 2}), list_arms(True, ("eagle3",)))
    assert [(best.arm.mode, best.arm.drafter) for best in found.best_arms()] == [("sd", "eagle3"), ("ar", "")]
    assert tune._recommend(found) == "recommended: --mode sd --num-draft-tokens 2"
    assert [one.drafter for one in found.record(0.0).choices] == ["eagle3", ""]


def test_auto_is_recommended_when_a_head_beats_the_draft_worker() -> None:
    found = measure(Machine(right={"": 0, "eagle3": 6}), list_arms(True, ("eagle3",)))
    assert tune._recommend(found) == "recommended: --mode auto"
    assert tune._format_arm(found.best_arms()[0]).startswith("  sd by eagle3 K=6 ")


def test_tune_without_a_draft_worker_compares_heads_with_plain_decoding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The result is saved by drafter, so that `auto` of the next server starts with it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = measure(Machine(curve((1, 10.0)), right=HEADS), list_arms(False, ("eagle3", "mtp")))
    monkeypatch.setattr(tune, "_measure_arms", lambda *_: found)
    assert main(["tune", "--draft-backend", "mtp", "--temp", "0.8"]) == 0
    captured = capsys.readouterr().out
    assert "100.0 tok/s" in captured and "recommended: --mode sd --num-draft-tokens 2" in captured
    (record,) = tuning.load(tuning.tuning_path(choose_pair(ServeSettings(draft_backend="mtp")).settings))
    assert [(one.mode, one.drafter, one.depth) for one in record.choices] == [
        ("sd", "eagle3", 2), ("ar", "", 0), ("sd", "mtp", 1),
    ]  # fmt: skip
    assert record.step_ms == pytest.approx(10) and record.verify_ms == ((1, 10), (2, 10), (3, 10), (5, 10), (7, 10))
    assert {own.name: own.step_ms for own in record.own} == {"eagle3": 2, "mtp": 2} and record.temp == 0.8
