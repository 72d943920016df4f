"""Which unit runs a package: the order of trials, the cached results, and the messages. Trials are scripted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.drafters.coreml import selection, trial
from outrider.drafters.coreml.package import WEIGHTS_PATH, Package
from outrider.drafters.coreml.runtimes import DeviceUnavailable
from outrider.drafters.coreml.selection import cached_package, package_folder
from outrider.drafters.coreml.trial import Trial
from tests.coreml.conftest import GOOD, SIZES, Converted

KILLED = "its trial was ended by signal 9 (Killed)"
TRYING = ["trying Core ML on CPU_AND_NE with this draft (once)", "trying Core ML on CPU_ONLY with this draft (once)"]

Choose = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choose:
    """`choose(package, results)`: the sentence of the choice if trials on units end so (one that is not named is
    killed), and the messages; checks the unit."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def run(package: Package, results: dict[str, Trial]) -> tuple[str, list[str]]:
        messages: list[str] = []
        monkeypatch.setattr(trial, "run_trial", lambda package, units: results.get(units, Trial(KILLED)))
        try:
            units, sentence = selection.choose_unit(package, messages.append)
        except DeviceUnavailable as error:
            return str(error), messages
        assert sentence.startswith(f"drafting with Core ML on {units}, ")
        return sentence, messages

    return run


def test_good_trial_on_the_neural_engine_ends_the_selection(
    converted: Callable[..., Converted], choose: Choose
) -> None:
    chosen, messages = choose(converted("llama").package, {"CPU_AND_NE": GOOD})
    assert chosen == "drafting with Core ML on CPU_AND_NE, fp16, 2.25 ms a token"
    assert messages == TRYING[:1]


def test_cpu_is_tried_next_and_the_reason_is_reported(converted: Callable[..., Converted], choose: Choose) -> None:
    chosen, messages = choose(converted("llama").package, {"CPU_ONLY": GOOD})
    assert chosen == f"drafting with Core ML on CPU_ONLY, fp16, 2.25 ms a token (CPU_AND_NE: {KILLED})"
    assert messages == TRYING


def test_unit_that_disagrees_with_mlx_is_not_used(converted: Callable[..., Converted], choose: Choose) -> None:
    wrong = replace(GOOD, agreement=0.5)
    chosen, _ = choose(converted("llama").package, {"CPU_AND_NE": wrong})
    assert chosen.startswith(
        "Core ML does not help this draft on this machine (CPU_AND_NE: it agreed with the reference"
    )
    assert chosen.endswith(f"; CPU_ONLY: {KILLED})")


def test_results_are_remembered_by_package_and_system(
    converted: Callable[..., Converted], choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, works = converted("llama").package, {"CPU_ONLY": GOOD}
    first, _ = choose(package, works)
    assert choose(package, {}) == (first, [])
    assert choose(converted("qwen2").package, {})[1] == TRYING
    monkeypatch.setattr(trial, "os_build", lambda: "99Z1")
    failed, messages = choose(package, {})
    assert messages == TRYING
    assert choose(package, works) == (failed, [])  # failures are remembered, too


def test_unreadable_result_is_rewritten(converted: Callable[..., Converted], choose: Choose, tmp_path: Path) -> None:
    package, works = converted("llama").package, {"CPU_AND_NE": GOOD}
    choose(package, works)
    (file,) = (tmp_path / "coreml" / "trials").iterdir()
    kept = file.read_text()
    for text in ("{", "{}", "[1]", kept.replace('"failure"', '"other"')):
        file.write_text(text)
        assert choose(package, works)[1] == TRYING[:1] and file.read_text() == kept


def test_a_model_is_converted_once_and_found_again_until_it_is_damaged(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    stages: list[str] = []
    model = tiny_model("llama", **SIZES, max_position_embeddings=64)
    assert not package_folder(model).exists() and package_folder(model) != package_folder(model, "int8")
    first = cached_package(model, stages.append)
    assert first.layout.weights == "fp16" and first.layout.context == 64 and first.path == package_folder(model)
    assert stages == [
        f"converting the draft for Core ML: {stage}" for stage in ("reading", "reading weights", "building", "checking")
    ]
    stages.clear()
    assert cached_package(model, stages.append).path == first.path and stages == []
    folder = first.path.parent
    assert [path for path in folder.iterdir() if path.is_dir()] == [first.path]
    (first.path / WEIGHTS_PATH).unlink()  # as macOS may do in a cache
    killed, older = folder / f".{first.path.stem}.unfinished", first.path.with_suffix(".3")
    for left in (killed, older):
        left.mkdir()
    assert (cached_package(model, stages.append).path / WEIGHTS_PATH).is_file()
    assert [path for path in folder.iterdir() if path.is_dir()] == [first.path]
