"""Which package runs on which unit: the order of trials, the cached verdicts, and the messages. Trials are scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.drafters.coreml import selection, trial
from outrider.drafters.coreml.layout import Options
from outrider.drafters.coreml.package import MODEL_PATH, Package
from outrider.drafters.coreml.selection import TRIED_WEIGHTS, OnePackage, Packages, Selection
from outrider.drafters.coreml.trial import TrialResult, TrialStore
from outrider.protocol.errors import ModelError
from tests.coreml.conftest import CONTEXT, GOOD, SIZES, Converted

VARIANTS = tuple(Options(weights, CONTEXT) for weights in TRIED_WEIGHTS)
NAMES = [variant.weights for variant in VARIANTS]
KILLED = "its trial was ended by SIGKILL"


@dataclasses.dataclass
class PackagesOnDemand:
    """A draft's packages, as if converted on demand: all are the same one with another manifest."""

    converted: Callable[..., Converted]
    existing: set[str] = dataclasses.field(default_factory=set)
    refused: str = ""
    variants: tuple[Options, ...] = VARIANTS
    source_hash: str = "0123456789abcdef0123"

    def is_converted(self, variant: Options) -> bool:
        return variant.weights in self.existing

    def get(self, variant: Options) -> Package:
        if variant.weights == self.refused:
            raise ModelError("the disk is full")
        self.existing.add(variant.weights)
        package = self.converted("llama").package
        layout = dataclasses.replace(package.layout, weights=variant.weights)
        files = package.manifest.files | {str(MODEL_PATH): f"{variant.weights} of {package.manifest.key}"}
        return dataclasses.replace(package, manifest=dataclasses.replace(package.manifest, layout=layout, files=files))

    def discard(self, variant: Options) -> None:
        self.existing.discard(variant.weights)


class ScriptedTrials:
    """Trials with results scripted for a unit and variant, or for a unit: a time, or the reason of a failure."""

    def __init__(self, results: dict[str, float | str], final: str = "") -> None:
        self._results, self._final, self.tried = results, final, list[str]()

    def __call__(self, package: Package, units: str) -> TrialResult:
        self.tried.append(f"{units} {package.options.weights}")
        end = self._results.get(f"{units} {package.options.weights}", self._results.get(units, KILLED))
        row = TrialResult(package.options, package.manifest.key, units)
        if isinstance(end, str):
            return dataclasses.replace(row, reason=end, final=end == self._final)
        return dataclasses.replace(row, trial=dataclasses.replace(GOOD, ms=dict.fromkeys(GOOD.ms, end)))


Choose = Callable[..., tuple[Selection, list[str]]]


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choose:
    """`choose(packages, script, thorough=False)`: the selection if trials end as in `script`, and the messages."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def run(
        packages: PackagesOnDemand | OnePackage, script: ScriptedTrials, thorough: bool = False
    ) -> tuple[Selection, list[str]]:
        reported: list[str] = []
        before = len(script.tried)
        monkeypatch.setattr(trial, "run_trial", script)
        chosen = selection.select_package(packages, reported.append, thorough)
        assert len(reported) == len(script.tried) - before and all("(once)" in sentence for sentence in reported)
        return chosen, reported

    return run


def units(chosen: Selection) -> str | None:
    assert (chosen.package is None) == (chosen.row is None)
    return None if chosen.row is None else chosen.row.units


def test_good_first_trial_on_the_neural_engine_ends_the_selection(
    converted: Callable[..., Converted], choose: Choose
) -> None:
    script = ScriptedTrials({"CPU_AND_NE": 2.25})
    chosen, reported = choose(PackagesOnDemand(converted), script)
    assert script.tried == ["CPU_AND_NE fp16"] and units(chosen) == "CPU_AND_NE"
    assert chosen.sentence == "drafting with Core ML on CPU_AND_NE, fp16, 2.25 ms a token"
    assert reported == ["trying Core ML on CPU_AND_NE with this draft, fp16 (once)"]


def test_other_weights_are_tried_before_other_units(converted: Callable[..., Converted], choose: Choose) -> None:
    script, packages = ScriptedTrials({"CPU_AND_NE int8": 3.0, "CPU_ONLY": 1.0}), PackagesOnDemand(converted)
    chosen, _ = choose(packages, script)
    assert script.tried == [f"CPU_AND_NE {name}" for name in NAMES]
    assert chosen.package is not None and chosen.package.layout.weights == "int8"
    fp16 = f"(CPU_AND_NE, fp16: {KILLED})"
    assert chosen.sentence == f"drafting with Core ML on CPU_AND_NE, int8, 3.00 ms a token {fp16}"


def test_cpu_is_tried_last_and_all_reasons_are_reported(converted: Callable[..., Converted], choose: Choose) -> None:
    script = ScriptedTrials({"CPU_ONLY": 4.0})
    chosen, _ = choose(PackagesOnDemand(converted), script)
    assert script.tried == [*(f"CPU_AND_NE {name}" for name in NAMES), "CPU_ONLY fp16"]
    assert units(chosen) == "CPU_ONLY" and "\n" not in chosen.sentence and chosen.sentence.count(KILLED) == 2


def test_mlx_drafts_without_a_good_trial(converted: Callable[..., Converted], choose: Choose) -> None:
    script = ScriptedTrials({})
    chosen, _ = choose(PackagesOnDemand(converted), script)
    assert units(chosen) is None and chosen.package is None
    assert chosen.sentence.startswith("Core ML does not help this draft on this machine (CPU_AND")
    assert len(script.tried) == 4


@pytest.mark.parametrize("thorough", [True, False])
def test_final_failure_ends_the_trials_of_a_unit(
    converted: Callable[..., Converted], choose: Choose, thorough: bool
) -> None:
    """Such as that of a missing unit, or one that hangs: a first start must not wait four times fifteen minutes."""
    script = ScriptedTrials({"CPU_AND_NE": "no such unit", "CPU_ONLY": 4.0}, final="no such unit")
    chosen, _ = choose(PackagesOnDemand(converted), script, thorough)
    assert script.tried[:2] == ["CPU_AND_NE fp16", "CPU_ONLY fp16"]
    assert len(script.tried) == (3 if thorough else 2) and units(chosen) == "CPU_ONLY"


@pytest.mark.parametrize(
    ("int8", "existing", "taken", "kept"),
    [
        (4.0, set(), "int8, 4.00", {"int8"}),
        (4.0, {"fp16"}, "int8, 4.00", {"fp16", "int8"}),  # an existing package stays
        (4.6, set(), "fp16, 5.00", {"fp16"}),  # not faster by a tenth
    ],
)
def test_thorough_selection_tries_everything_and_takes_the_fastest(
    converted: Callable[..., Converted], choose: Choose, int8: float, existing: set[str], taken: str, kept: set[str]
) -> None:
    script = ScriptedTrials({"CPU_AND_NE": 5.0, "CPU_AND_NE int8": int8, "CPU_ONLY": 1.0})
    packages = PackagesOnDemand(converted, existing=existing)
    chosen, _ = choose(packages, script, thorough=True)
    assert script.tried == [f"{units} {name}" for units in ("CPU_AND_NE", "CPU_ONLY") for name in NAMES]
    assert chosen.sentence == f"drafting with Core ML on CPU_AND_NE, {taken} ms a token"
    assert packages.existing == kept
    script.tried.clear()
    assert choose(packages, script)[0].sentence == chosen.sentence and script.tried == []


def test_verdicts_are_remembered_by_package_and_system(
    converted: Callable[..., Converted], choose: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, packages = ScriptedTrials({"CPU_AND_NE int8": 2.0}), PackagesOnDemand(converted)
    first, _ = choose(packages, script)
    assert packages.existing == {"fp16", "int8"}
    script.tried.clear()
    again, _ = choose(packages, script)
    assert script.tried == [] and units(again) == units(first) and again.sentence == first.sentence
    one = OnePackage(converted("llama").package)  # a package that is given by its path has trials of its own
    assert units(choose(one, script)[0]) is None
    assert script.tried == [f"{units} fp16" for units in ("CPU_AND_NE", "CPU_ONLY")]
    script.tried.clear()
    monkeypatch.setattr(trial, "os_build", lambda: "99Z1")
    choose(packages, script)
    assert script.tried == ["CPU_AND_NE fp16", "CPU_AND_NE int8"]
    script.tried.clear()
    monkeypatch.setattr(packages, "converted", lambda family, **kind: converted("qwen2", **kind))
    choose(packages, script)  # other packages under the same names
    assert script.tried == ["CPU_AND_NE fp16", "CPU_AND_NE int8"]


def test_fallback_to_mlx_is_remembered(converted: Callable[..., Converted], choose: Choose) -> None:
    script, packages = ScriptedTrials({}), PackagesOnDemand(converted)
    first, _ = choose(packages, script)
    script.tried.clear()
    again, _ = choose(packages, script)
    assert script.tried == [] and units(again) is None and again.sentence == first.sentence


def test_unreadable_results_file_is_rewritten(
    converted: Callable[..., Converted], choose: Choose, tmp_path: Path
) -> None:
    script, packages = ScriptedTrials({"CPU_AND_NE": 2.0}), PackagesOnDemand(converted)
    choose(packages, script)
    (file,) = (tmp_path / "coreml" / "probes").iterdir()
    kept = file.read_text()
    changed = [kept.replace(word, '"other"') for word in ('"agreement"', '"fp16"')]
    for text in ("{", "{}", "[1]", '[{"key": "x"}]', *changed):
        file.write_text(text)
        script.tried.clear()
        assert units(choose(packages, script)[0]) == "CPU_AND_NE"
        assert script.tried == ["CPU_AND_NE fp16"]


def test_saved_trial_rows_are_read_back_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    rows = [
        TrialResult(Options("int8", 1024), "a", "CPU_ONLY", reason=KILLED, final=True),
        TrialResult(Options("fp16", 64), "a", "CPU_AND_NE", GOOD),
    ]
    kept = TrialStore("f" * 64)
    for row in rows:
        kept.add(row)
    kept.add(dataclasses.replace(rows[0], final=False))
    assert TrialStore("f" * 64).rows == [dataclasses.replace(rows[0], final=False), rows[1]]
    assert TrialStore("e" * 64).rows == []


def test_package_that_cannot_be_built_is_skipped(converted: Callable[..., Converted], choose: Choose) -> None:
    script = ScriptedTrials({"CPU_ONLY": 4.0})
    chosen, _ = choose(PackagesOnDemand(converted, refused="int8"), script)
    assert units(chosen) == "CPU_ONLY" and "CPU_AND_NE, int8: the disk is full" in chosen.sentence
    with pytest.raises(ModelError, match="the disk is full"):
        choose(PackagesOnDemand(converted, refused="fp16", source_hash="another draft"), script)


def test_packages_of_a_checkpoint_are_made_and_removed(
    tiny_model: Callable[..., Path],
    converted: Callable[..., Converted],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    packages = Packages(tiny_model("llama", **SIZES, max_position_embeddings=128))
    assert packages.variants == tuple(Options(weights, 128) for weights in NAMES)
    form = packages.variants[1]
    assert not packages.is_converted(form)
    assert packages.get(form).options == form and packages.is_converted(form)
    assert packages.source_hash == packages.get(form).manifest.source_hash
    packages.discard(form)
    assert not packages.is_converted(form)
    assert not any(path.is_dir() for path in (tmp_path / "coreml" / "packages").iterdir())
    named = OnePackage(converted("llama").package)
    named.discard(named.variants[0])
    assert named.get(named.variants[0]).path.is_dir()
