"""Which package runs on which unit: the order of trials, the cached verdicts, and the messages. Trials are scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.drafters.coreml import selection
from outrider.drafters.coreml.layout import Mode
from outrider.drafters.coreml.package import Package
from outrider.drafters.coreml.selection import (
    VARIANTS,
    OfCheckpoint,
    OnePackage,
    ProbeVerdict,
    Selection,
    Tried,
    Variant,
    Verdicts,
)
from outrider.drafters.coreml.trial import Trial
from outrider.protocol.errors import ModelError
from tests.coreml.conftest import GOOD, Bench

NAMES = [str(variant) for variant in VARIANTS]
KILLED = "its trial was ended by SIGKILL"


def trial(units: str, ms: float) -> Trial:
    return dataclasses.replace(GOOD, units=units, ms=dict.fromkeys(GOOD.ms, ms))


@dataclasses.dataclass
class Made:
    """A draft's packages out of a bench, those of other kinds than wanted made on demand like a converter's."""

    bench: Callable[..., Bench]
    there: set[str] = dataclasses.field(default_factory=set)
    refused: str = ""
    variants: tuple[Variant, ...] = VARIANTS
    source_hash: str = "0123456789abcdef0123"

    def made(self, variant: Variant) -> bool:
        return str(variant) in self.there

    def get(self, variant: Variant) -> Package:
        if str(variant) == self.refused:
            raise ModelError("the disk is full")
        self.there.add(str(variant))
        return self.bench("llama", mode=variant.mode.value, weights=variant.weights).package

    def discard(self, variant: Variant) -> None:
        self.there.discard(str(variant))


class Scripted:
    """Trials that end as told by (unit, variant) or unit: a time is good, a word is the reason it is not."""

    def __init__(self, ends: dict[str, float | str], final: str = "") -> None:
        self._ends, self._final, self.tried = ends, final, list[str]()

    def __call__(self, package: Package, units: str) -> ProbeVerdict:
        variant = str(Variant(package.layout.mode, package.layout.weights))
        self.tried.append(f"{units} {variant}")
        end = self._ends.get(f"{units} {variant}", self._ends.get(units, KILLED))
        if isinstance(end, str):
            return ProbeVerdict(units, None, end, final=end == self._final)
        return ProbeVerdict(units, trial(units, end))


def choose(packages: Made, memory: Path, script: Scripted, thorough: bool = False) -> tuple[Selection, list[str]]:
    heard: list[str] = []
    chosen = selection.choose(packages, memory, heard.append, thorough, script)
    assert len(heard) == len(script.tried) and all("(once)" in sentence for sentence in heard)
    return chosen, heard


def test_the_neural_engine_is_tried_first_and_often_alone(bench: Callable[..., Bench], tmp_path: Path) -> None:
    script = Scripted({"CPU_AND_NE": 2.25})
    chosen, heard = choose(Made(bench), tmp_path, script)
    assert script.tried == ["CPU_AND_NE stateless fp16"] and chosen.units == "CPU_AND_NE"
    assert chosen.sentence == "drafting with Core ML on CPU_AND_NE, stateless fp16, 2.25 ms a token"
    assert heard == ["trying Core ML on CPU_AND_NE with this draft, stateless fp16 (once)"]


def test_another_mode_before_another_unit(bench: Callable[..., Bench], tmp_path: Path) -> None:
    script, packages = Scripted({"CPU_AND_NE onehot fp16": 3.0, "CPU_ONLY": 1.0}), Made(bench)
    chosen, _ = choose(packages, tmp_path, script)
    assert script.tried == [f"CPU_AND_NE {name}" for name in NAMES[:3]]
    assert chosen.package is not None and chosen.package.layout.mode is Mode.ONEHOT
    assert chosen.sentence.startswith("drafting with Core ML on CPU_AND_NE, onehot fp16, 3.00 ms a token (CPU_AND_NE, ")
    assert f"stateless fp16: {KILLED}; CPU_AND_NE, hybrid fp16: {KILLED})" in chosen.sentence


def test_then_the_cpu_with_a_sentence(bench: Callable[..., Bench], tmp_path: Path) -> None:
    script = Scripted({"CPU_ONLY": 4.0})
    chosen, _ = choose(Made(bench), tmp_path, script)
    assert script.tried == [*(f"CPU_AND_NE {name}" for name in NAMES), "CPU_ONLY stateless fp16"]
    assert chosen.units == "CPU_ONLY" and "\n" not in chosen.sentence and chosen.sentence.count(KILLED) == 6


def test_without_a_good_trial_mlx_drafts(bench: Callable[..., Bench], tmp_path: Path) -> None:
    chosen, _ = choose(Made(bench), tmp_path, Scripted({}))
    assert chosen.units is None and chosen.package is None
    assert chosen.sentence.startswith(
        "Core ML does not help this draft on this machine; drafting with MLX instead (CPU_AND"
    )
    assert len(chosen.tried) == 12


@pytest.mark.parametrize("thorough", [True, False])
def test_what_no_package_can_mend_ends_the_tries_of_a_unit(
    bench: Callable[..., Bench], tmp_path: Path, thorough: bool
) -> None:
    """A unit that is not there, or hangs: twelve waits of fifteen minutes would be no first use."""
    script = Scripted({"CPU_AND_NE": "no such unit", "CPU_ONLY": 4.0}, final="no such unit")
    chosen, _ = choose(Made(bench), tmp_path, script, thorough)
    assert script.tried[:2] == ["CPU_AND_NE stateless fp16", "CPU_ONLY stateless fp16"]
    assert len(script.tried) == (7 if thorough else 2) and chosen.units == "CPU_ONLY"


def test_thoroughly_everything_is_tried_and_the_quickest_taken(bench: Callable[..., Bench], tmp_path: Path) -> None:
    script = Scripted({"CPU_AND_NE": 5.0, "CPU_AND_NE hybrid fp16": 4.6, "CPU_AND_NE stateless int8": 4.0,
                       "CPU_AND_NE onehot int8": 3.9, "CPU_ONLY": 1.0})  # fmt: skip
    packages = Made(bench, there={"hybrid fp16"})
    chosen, _ = choose(packages, tmp_path, script, thorough=True)
    assert script.tried == [f"{units} {name}" for units in ("CPU_AND_NE", "CPU_ONLY") for name in NAMES]
    assert chosen.sentence == "drafting with Core ML on CPU_AND_NE, stateless int8, 4.00 ms a token"  # a tenth counts
    assert packages.there == {"stateless int8", "hybrid fp16"}  # what was there already stays
    script.tried.clear()
    assert choose(packages, tmp_path, script)[0].sentence == chosen.sentence and script.tried == []


def test_verdicts_are_remembered_by_package_and_system(
    bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, packages = Scripted({"CPU_AND_NE hybrid fp16": 2.0}), Made(bench)
    first, _ = choose(packages, tmp_path, script)
    assert packages.there == {"stateless fp16", "hybrid fp16"}
    script.tried.clear()
    again, _ = choose(packages, tmp_path, script)
    assert script.tried == [] and again.units == first.units and again.sentence == first.sentence
    one = OnePackage(bench("llama").package)  # the same package, named: known to be bad
    assert selection.choose(one, tmp_path, print, attempt=script).units is None
    assert script.tried == [f"{units} stateless fp16" for units in ("CPU_AND_NE", "CPU_ONLY")]
    script.tried.clear()
    monkeypatch.setattr(selection, "os_build", lambda: "99Z1")
    choose(packages, tmp_path, script)
    assert script.tried == ["CPU_AND_NE stateless fp16", "CPU_AND_NE hybrid fp16"]
    script.tried.clear()
    monkeypatch.setattr(packages, "bench", lambda family, **kind: bench("qwen2", **kind))
    choose(packages, tmp_path, script)  # other packages under the same names
    assert script.tried == ["CPU_AND_NE stateless fp16", "CPU_AND_NE hybrid fp16"]


def test_a_fallback_to_mlx_is_remembered_too(bench: Callable[..., Bench], tmp_path: Path) -> None:
    script, packages = Scripted({}), Made(bench)
    first, _ = choose(packages, tmp_path, script)
    script.tried.clear()
    again, _ = choose(packages, tmp_path, script)
    assert script.tried == [] and again.units is None and again.sentence == first.sentence


def test_a_memory_that_can_not_be_read_is_made_anew(bench: Callable[..., Bench], tmp_path: Path) -> None:
    script, packages = Scripted({"CPU_AND_NE": 2.0}), Made(bench)
    choose(packages, tmp_path, script)
    (file,) = tmp_path.iterdir()
    for text in ("{", "{}", "[1]", '[{"key": "x"}]', file.read_text().replace('"agreement"', '"agree"')):
        file.write_text(text)
        script.tried.clear()
        assert choose(packages, tmp_path, script)[0].units == "CPU_AND_NE"
        assert script.tried == ["CPU_AND_NE stateless fp16"]


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    rows = [
        Tried(Variant(Mode.HYBRID, "int8"), 1024, "a", ProbeVerdict("CPU_ONLY", None, KILLED, final=True)),
        Tried(Variant(Mode.ONEHOT, "fp16"), 64, "a", ProbeVerdict("CPU_AND_NE", GOOD)),
    ]
    kept = Verdicts(tmp_path, "f" * 64)
    for row in rows:
        kept.add(row)
    kept.add(dataclasses.replace(rows[0], context=512))
    assert Verdicts(tmp_path, "f" * 64).rows == [rows[1], dataclasses.replace(rows[0], context=512)]
    assert Verdicts(tmp_path, "e" * 64).rows == []


def test_a_package_that_can_not_be_made_is_passed_over(bench: Callable[..., Bench], tmp_path: Path) -> None:
    script = Scripted({"CPU_ONLY": 4.0})
    chosen, _ = choose(Made(bench, refused="hybrid fp16"), tmp_path, script)
    assert chosen.units == "CPU_ONLY" and "CPU_AND_NE, hybrid fp16: the disk is full" in chosen.sentence
    with pytest.raises(ModelError, match="the disk is full"):
        choose(Made(bench, refused="stateless fp16"), tmp_path / "other", script)


def test_a_checkpoints_packages(tiny_model: Callable[..., Path], bench: Callable[..., Bench], tmp_path: Path) -> None:
    made = bench("llama")
    packages = dataclasses.replace(OfCheckpoint.of(made.model_path, 64), folder=tmp_path)
    variant = Variant(Mode.STATELESS, "int8")
    assert packages.source_hash == made.package.manifest.source_hash and not packages.made(variant)
    layout = packages.get(variant).layout
    assert (layout.mode, layout.weights, layout.context) == (Mode.STATELESS, "int8", 64) and packages.made(variant)
    packages.discard(variant)
    assert not packages.made(variant) and list(tmp_path.iterdir()) == []
    named = OnePackage(made.package)
    named.discard(named.variants[0])
    assert named.get(named.variants[0]).path.is_dir()
