"""What `auto` learned is passed to the next server in a file, and no state of that file prevents a start."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.core.policy.acceptance import GENERAL_TEXT
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.policy.policy import Policy
from outrider.orchestrator.core.policy.tuning import WRITE_INTERVAL_SECONDS, PolicyStore, TunedArm, Tuning
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.digest import CACHE_VARIABLE
from tests.harness.settings import round_settings
from tools.simulation.auto_rounds import ADMIT

MODES = ("ar", "sd", "ssd")


def trained_estimates() -> Estimates:
    found = Estimates()
    for _ in range(200):
        for rows in (1, 4, 5, 20):
            found.observe_verify(rows, 10.0 + 0.5 * rows)
        found.pipelined_ms.add(1, 9.5)
        found.observe_depth(16, 3.5)
        found.observe_draft(4, 8.0)
        found.observe_link(0.4)
        found.observe_chain(4, 2)
        found.observe_lookup(True, 16)
        found.turnaround_ms.add(0.2)
    return found


RECORD = trained_estimates().snapshot((TunedArm("ssd", 0, 0, 150.0, True), TunedArm("ar", 0, 0, 90.0, True, 4)), 0.0)


def test_learned_rates_are_restored_from_the_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "memory.json"
    PolicyStore(path, 0).write((RECORD,), 0)
    assert PolicyStore(path, 0).read() == (RECORD,)
    fresh, old = Estimates(), trained_estimates()
    fresh.start_from(RECORD)
    for ask in (
        lambda e: e.forward_ms(5), lambda e: e.forward_ms(40), lambda e: e.forward_ms(5, True),
        lambda e: e.plain_ms(1), lambda e: e.trees_ms(16), lambda e: e.chain_ms(4),
        lambda e: e.turnaround_ms(), lambda e: e.hit_rate_of(16),
    ):  # fmt: skip
        assert ask(fresh) == pytest.approx(ask(old), rel=0.01)
    # A record counts as much as a few rounds, so its odds are halfway between the learned and the default ones.
    assert abs(fresh.drafted.rate(2) - old.drafted.rate(2)) < abs(Estimates().drafted.rate(2) - old.drafted.rate(2))


def test_policy_starts_where_another_ended() -> None:
    first = Policy(trained_estimates(), MODES, 4, 16)
    for _ in range(40 * POLICY.episode_rounds):
        plan = first.plan()
        first.observe_round(plan, 2, 2 / {"ar": 0.15, "sd": 0.06, "ssd": 0.1}[plan.mode])
    second = Policy(trained_estimates(), MODES, 4, 16)
    second.start_from(first.learned())
    assert second.plan() == Arm("ar", 1, 16) and "measured before" in second.why


def test_rates_of_other_kinds_and_loads_outlive_a_server_that_does_not_measure_them() -> None:
    stored = (
        TunedArm("ssd", 0, 0, 150.0, True),
        TunedArm("ssd", 0, 0, 230.0, True, kind="code"),
        TunedArm("ar", 0, 0, 90.0, True),
        TunedArm("ar", 0, 0, 300.0, True, 4),
    )
    record = trained_estimates().snapshot(stored, 0.0)
    for milliseconds in (10.0, 20.0):  # both servers measure the same arm
        planner = Planner(round_settings(4, 16), memory=[record])
        policy = planner._policy(ADMIT, planner._sources("", 1), planner.open_text(GENERAL_TEXT, greedy=True))
        for _ in range(POLICY.min_episode_rounds):
            policy.observe_round(policy.plan(), 2, milliseconds)
        (record,) = planner.learned()
        assert {*stored} < {*record.choices} and len(record.choices) == len(stored) + 1


def test_tuned_k_and_b_are_kept_over_learned_ones() -> None:
    policy = Policy(Estimates(), MODES, 4, 16)
    policy.start_from([TunedArm("ssd", 6, 4, 204.0), TunedArm("ar", 0, 0, 92.0)])
    policy.start_from([TunedArm("ssd", 3, 8, 500.0, True), TunedArm("ssd", 6, 4, 210.0, True)])
    assert policy.plan() == Arm("ssd", 6, 4) and "fastest measured before (210 tokens/s)" in policy.why


def test_changed_tuning_file_discards_the_learned_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    settings = ServeSettings(model="a", draft_model="b")
    tuned = tuning.tuning_path(settings)
    PolicyStore(tuning.memory_path(settings), 0).write((RECORD,), 0)
    assert PolicyStore(tuning.memory_path(settings), 0).read() == (RECORD,)
    tuned.write_text("tuned")
    server = PolicyStore(tuning.memory_path(settings), 0)
    assert server.read() == ()
    server.write((RECORD,), 0)
    for moment in (1, 2**32):
        os.utime(tuned, (moment,) * 2)
        read = PolicyStore(tuning.memory_path(settings), 0).read()
        assert read == (RECORD,), "the time of the file does not matter"
    tuned.write_text("tuned again")
    assert PolicyStore(tuning.memory_path(settings), 0).read() == ()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"format": 1}',
        '{"format": 2, "tunings": [{}]}',
        "\0\xff",
        '{"format": 2, "x": ' + "[" * 100_000,
        '{"format": 2, "tunings": [{"choices": [3]}]}',
    ],
)
def test_damaged_policy_file_is_ignored(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "memory.json"
    path.write_text(content)
    assert PolicyStore(path, 0).read() == ()
    PolicyStore(path, 0).write((RECORD,), 0)
    assert PolicyStore(path, 0).read() == (RECORD,)


@pytest.mark.parametrize("word", ["1e999", "1e300", "NaN", "Infinity", "-3.0", '"x"', "null"])
def test_policy_file_with_an_invalid_number_is_ignored(tmp_path: Path, word: str) -> None:
    path = tmp_path / "memory.json"
    PolicyStore(path, 0).write((RECORD,), 0)
    text = path.read_text()
    for known in ("150.0", f'"link_ms": {RECORD.link_ms}'):
        assert known in text
        path.write_text(text.replace(known, known.replace("150.0", word).replace(str(RECORD.link_ms), word)))
        assert PolicyStore(path, 0).read() == ()


@pytest.mark.parametrize(("field", "number"), [("depth", 99), ("depth", -1), ("branches", 1000), ("branches", -1)])
def test_policy_file_with_a_k_or_b_that_no_message_can_hold_is_ignored(tmp_path: Path, field: str, number: int) -> None:
    path = tmp_path / "memory.json"
    (arm,) = RECORD.choices[:1]
    tuning.write([replace(RECORD, choices=(replace(arm, **{field: number}),))], path)
    assert PolicyStore(path, 0).read() == ()


def test_unwritable_policy_file_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    memory = PolicyStore(tmp_path / "file" / "memory.json", 0)
    for minute in range(3):
        memory.write((RECORD,), minute)
    assert (tmp_path / "file").read_text() == ""
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "can't be saved" in warning and warning.endswith("the next server starts without it")


def test_missing_home_folder_disables_the_policy_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    memory = PolicyStore(tuning.memory_path(ServeSettings()), 0)
    assert memory.read() == ()
    memory.write((RECORD,), 0)


def test_policy_file_is_not_read_or_written_when_disabled() -> None:
    memory = PolicyStore(None, 0)
    memory.write((RECORD,), 0)
    assert memory.read() == () and not memory.is_due(10**18)


def test_policy_file_is_written_periodically(tmp_path: Path) -> None:
    memory, later = PolicyStore(tmp_path / "memory.json", 0), (WRITE_INTERVAL_SECONDS + 1) * 10**9
    assert not memory.is_due(1) and memory.is_due(later)
    memory.write((RECORD,), later)
    assert not memory.is_due(later + 1)


def test_policy_file_is_not_written_while_nothing_is_learned(tmp_path: Path) -> None:
    path, store = tmp_path / "memory.json", PolicyStore(tmp_path / "memory.json", 0)
    store.write((RECORD,), 0)
    path.write_text("another server's")
    store.write((trained_estimates().snapshot(RECORD.choices, 0.0),), 1)
    assert path.read_text() == "another server's"
    store.write((trained_estimates().snapshot((), 0.0),), 2)
    assert PolicyStore(path, 0).read()[0].choices == ()


def test_each_pair_and_way_of_drafting_has_its_own_policy_file() -> None:
    pair = {"model": "a", "draft_model": "b"}
    others: list[dict[str, object]] = [{"draft_model": "c"}, {"threads": 2}, {"ngrams": False}, {"colocate": True}]
    settings = [ServeSettings(**{**pair, **other}) for other in ({}, *others)]  # type: ignore[arg-type]
    assert len({tuning.memory_path(each) for each in settings}) == len(settings)
    assert tuning.memory_path(settings[0]).parent == tuning.tuning_path(settings[0]).parent


def test_old_tuning_file_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(
        '{"format": 2, "tunings": [{"step_ms": 9, "verify_ms": [[1, 10]], "depth_ms": 3, "draft_ms": 2, "link_ms": 0.3,'
        ' "turnaround_ms": 0.3, "acceptance": [0.7], "hit_rate": 0.8, "temp": 0.0,'
        ' "choices": [{"mode": "ar", "depth": 0, "branches": 0, "tokens_per_second": 90.0, "measured": false}]}]}'
    )
    assert tuning.load(path) == (
        Tuning(9.0, ((1, 10.0),), 3.0, 2.0, 0.3, 0.3, (0.7,), 0.8, (TunedArm("ar", 0, 0, 90.0),)),
    )
