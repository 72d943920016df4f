"""A tuning record is read back as it was written, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.core.policy.tuning import TunedArm, Tuning
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.digest import CACHE_VARIABLE
from outrider.protocol.errors import InvalidRequest

RECORD = Tuning(
    10.0,
    ((1, 10.5), (4, 12.0)),
    3.5,
    1.9,
    0.3,
    0.4,
    (0.8, 0.7),
    0.85,
    (TunedArm("ssd", 3, 8, 200.0), TunedArm("ar", 0, 0, 95.0)),
)


def test_saved_record_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tuning.json"
    tuning.save(RECORD, path)
    assert tuning.load(path) == (RECORD,)
    assert [found.name for found in path.parent.iterdir()] == ["tuning.json"]


def test_each_temperature_class_has_its_own_record(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    warm, hot = replace(RECORD, temp=0.7, hit_rate=0.7), replace(RECORD, temp=1.0, hit_rate=0.6)
    for record in (warm, RECORD, hot):
        tuning.save(record, path)
    assert set(tuning.load(path)) == {RECORD, hot}


def test_nearest_prefers_a_record_of_the_temperature_class() -> None:
    warm, hot = replace(RECORD, temp=0.6), replace(RECORD, temp=1.2)
    everything = (hot, RECORD, warm)
    assert [tuning.nearest_record(everything, temp) for temp in (0.0, 0.05, 0.8, 2.0)] == [RECORD, warm, warm, hot]
    assert tuning.nearest_record((RECORD,), 0.8) == RECORD
    assert tuning.nearest_record((), 0.0) is None


def test_missing_file_has_no_records(tmp_path: Path) -> None:
    assert tuning.load(tmp_path / "none.json") == ()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 2}', '{"format": 99}', '{"format": 2, "tunings": [{"choices": 3}]}']
)
def test_damaged_file_has_no_records(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(content)
    assert tuning.load(path) == ()


def test_files_are_in_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert tuning.tuning_path(ServeSettings()).parent == tuning.memory_path(ServeSettings()).parent == tmp_path


def test_unwritable_folder_raises_invalid_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="can't be written"):
        tuning.save(RECORD, tmp_path / "file" / "tuning.json")


def test_settings_that_change_the_costs_have_their_own_path() -> None:
    given: dict[str, Any] = {"model": "a", "draft_model": "b"}
    changes: list[dict[str, Any]] = [
        {}, {"draft_model": "c"}, {"threads": 2}, {"cpu_kernels": "mlx"}, {"draft_device": "cpu"},
    ]  # fmt: skip
    settings = [ServeSettings(**{**given, **changed}) for changed in changes]
    for path_of in (tuning.tuning_path, tuning.memory_path):
        assert len(set(map(path_of, settings))) == len(changes)


def test_other_implementations_of_workers_have_their_own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, paths = ServeSettings(model="a", draft_model="b"), set()
    for name in ("", "one", "other"):
        if name:
            monkeypatch.setenv("OUTRIDER_WORKER_MODULES", f'{{"target": ["{name}"]}}')
        paths |= {tuning.tuning_path(settings), tuning.memory_path(settings)}
    assert len(paths) == 6
