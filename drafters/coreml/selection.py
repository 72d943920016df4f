"""Chooses the package of a draft and the compute unit of this machine that runs it, by trials that are kept.

At first use, trials end with the first good one; a thorough selection tries everything and takes the fastest. The
Neural Engine comes first, because a drafter there slows the target least; then the CPU; then MLX.

`try_out` runs one package on one unit in a process that may crash. `Verdicts` keeps the results: each is valid for one
package (by its hash), one build of macOS and one version of coremltools. The packages are those of a checkpoint
(`OfCheckpoint`, converted on demand) or a single one that was named (`OnePackage`).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from outrider.drafters.coreml import converter, package, trial
from outrider.drafters.coreml.converter import Options, Progress
from outrider.drafters.coreml.interpreter import REFERENCE, NumpyRuntime
from outrider.drafters.coreml.layout import Mode
from outrider.drafters.coreml.layout import read as read_architecture
from outrider.drafters.coreml.package import Package
from outrider.drafters.coreml.runtimes import os_build
from outrider.drafters.coreml.trial import Trial
from outrider.protocol.digest import replace_file
from outrider.protocol.errors import ModelError

log = logging.getLogger(__name__)

PREFERRED = ("CPU_AND_NE", "CPU_ONLY")
PREDICTIONS = 300
MODULE = "outrider.drafters.coreml.trial"
_SECONDS = 900.0  # a first compile for the Neural Engine can take minutes
_LEAST_AGREEMENT = 0.9
_MOST_DISTANCE = 0.05


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """The result of a trial on one unit: `trial` if it finished, `reason` if the unit must not be used.

    `final`: no other package will do better on this unit, see `trial.Ending`.
    """

    units: str
    trial: Trial | None
    reason: str = ""
    final: bool = False

    @property
    def good(self) -> bool:
        return not self.reason


def try_out(package: Package, units: str, predictions: int = PREDICTIONS) -> ProbeVerdict:
    """Runs the trial of `units` in a subprocess: compile, load, compare, predict, time."""
    ending = trial.run_program(MODULE, arguments(package, units, predictions), _SECONDS)
    if ending.written is None:
        return ProbeVerdict(units, None, ending.reason, ending.final)
    return judge(Trial(**json.loads(ending.written)))


def arguments(package: Package, units: str, predictions: int) -> list[str]:
    """Returns the trial's command line without the file for its result."""
    return ["--package", str(package.path), "--units", units, "--predictions", str(predictions)]


def judge(trial: Trial) -> ProbeVerdict:
    """Returns the verdict on a finished trial, by its agreement with the reference."""
    if not trial.agreement >= _LEAST_AGREEMENT:  # also for NaN
        reason = f"it agreed with the reference on {trial.agreement:.0%} of tokens; expected {_LEAST_AGREEMENT:.0%}"
    elif not trial.distance <= _MOST_DISTANCE:
        reason = f"its distributions are {trial.distance:.3f} from the reference; expected at most {_MOST_DISTANCE}"
    else:
        reason = ""
    return ProbeVerdict(trial.units, trial, reason)


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of a draft's package."""

    mode: Mode
    weights: str

    def __str__(self) -> str:
        return f"{self.mode.value} {self.weights}"


@dataclass(frozen=True, slots=True)
class Tried:
    """A variant's verdict; `key` is the package's own hash, `context` its length in tokens."""

    variant: Variant
    context: int
    key: str
    verdict: ProbeVerdict

    @classmethod
    def of(cls, package: Package, verdict: ProbeVerdict) -> Tried:
        layout = package.layout
        return cls(Variant(layout.mode, layout.weights), layout.context, package.manifest.key, verdict)


class Verdicts:
    """The verdicts kept in `folder` for the draft whose weights have the hash `source_hash`."""

    def __init__(self, folder: Path, source_hash: str) -> None:
        self._file = folder / f"{source_hash[:16]}-{os_build()}-coremltools{version('coremltools')}.json"
        self.rows: list[Tried] = read(self._file, _tried)

    def find(self, package: Package, units: str) -> ProbeVerdict | None:
        rows = [row for row in self.rows if row.key == package.manifest.key and row.verdict.units == units]
        return rows[-1].verdict if rows else None

    def add(self, row: Tried) -> None:
        key = (row.key, row.verdict.units)
        self.rows = [other for other in self.rows if (other.key, other.verdict.units) != key] + [row]
        write(self._file, [dataclasses.asdict(kept) for kept in self.rows])


def read(file: Path, parse: Callable[[Any], Row]) -> list[Row]:
    """Returns the rows of `file`; none if it is missing or unreadable, so that trials run again."""
    try:
        return [parse(fields) for fields in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """Writes `rows` atomically: a concurrent reader gets either the old rows or the new ones."""
    replace_file(file, json.dumps(rows, indent=1))


def _tried(fields: dict[str, Any]) -> Tried:
    kept = fields["verdict"]
    trial = None if kept["trial"] is None else Trial(**kept["trial"])
    verdict = ProbeVerdict(str(kept["units"]), trial, str(kept["reason"]), bool(kept["final"]))
    variant = Variant(Mode(fields["variant"]["mode"]), str(fields["variant"]["weights"]))
    return Tried(variant, int(fields["context"]), str(fields["key"]), verdict)


VARIANTS = tuple(Variant(mode, weights) for weights in ("fp16", "int8") for mode in Mode)
"""In the order of trials: the draft's own numbers first, and the modes that the Neural Engine accepts most often."""


@dataclass(frozen=True, slots=True)
class OfCheckpoint:
    """Packages of the model directory `checkpoint`, of `context` tokens, kept in `folder` (the cache by default)."""

    checkpoint: Path
    context: int
    source_hash: str
    progress: Progress | None = None
    folder: Path | None = None
    variants: tuple[Variant, ...] = VARIANTS

    @classmethod
    def of(cls, checkpoint: Path, context: int, progress: Progress | None = None) -> OfCheckpoint:
        return cls(checkpoint, context, package.fingerprint(checkpoint), progress)

    def made(self, variant: Variant) -> bool:
        """Whether the package exists already."""
        return converter.directory_of(self.source_hash, self._options(variant), self.folder).exists()

    def get(self, variant: Variant) -> Package:
        """Returns the package, converted now if necessary. Raises ModelError if that fails."""
        return converter.package_of(self.checkpoint, self._options(variant), self.progress, self.folder)

    def discard(self, variant: Variant) -> None:
        """Removes a package, which can be converted again."""
        directory = converter.directory_of(self.source_hash, self._options(variant), self.folder)
        shutil.rmtree(directory, ignore_errors=True)

    def _options(self, variant: Variant) -> Options:
        return Options(variant.mode, variant.weights, self.context)


@dataclass(frozen=True, slots=True)
class OnePackage:
    """A single package that was named, and is never removed."""

    package: Package

    @property
    def source_hash(self) -> str:
        return self.package.manifest.source_hash

    @property
    def variants(self) -> tuple[Variant, ...]:
        return (Variant(self.package.layout.mode, self.package.layout.weights),)

    def made(self, variant: Variant) -> bool:
        return True

    def get(self, variant: Variant) -> Package:
        return self.package

    def discard(self, variant: Variant) -> None:
        """Does nothing: the package belongs to the user."""


PackageSource = OfCheckpoint | OnePackage
"""The packages of a draft on this machine."""


_WEIGHED = ("q1", "q8", "q16")  # the functions that a round of drafting calls
_WORTH_A_CHANGE = 0.9  # of the time of an earlier variant

Try = Callable[[Package, str], ProbeVerdict]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """`package` and `units` to use, None for none; `sentence` tells users the choice and its reasons."""

    package: Package | None
    units: str | None
    sentence: str
    tried: tuple[Tried, ...]


def choose(
    packages: PackageSource, memory: Path, tell: Tell, thorough: bool = False, attempt: Try = try_out
) -> Selection:
    """Returns the package and unit to draft with.

    Args:
        memory: the directory of verdicts.
        tell: receives a sentence before each trial, which may take minutes.
        thorough: try every package on every unit; packages made only for that are removed again.

    Raises:
        ModelError: no package of the draft can be made.
    """
    return _Selector(packages, Verdicts(memory, packages.source_hash), tell, attempt).choose(thorough)


class _Selector:
    def __init__(self, packages: PackageSource, verdicts: Verdicts, tell: Tell, attempt: Try) -> None:
        self._packages, self._verdicts, self._tell, self._attempt = packages, verdicts, tell, attempt
        self._made_here = [variant for variant in packages.variants if not packages.made(variant)]
        self._rows: list[Tried] = []

    def choose(self, thorough: bool) -> Selection:
        chosen: Tried | None = None
        for units in PREFERRED:
            if chosen is None or thorough:
                rows = self._try_all(units) if thorough else self._known(units) or self._try_until_good(units)
                self._rows += [row for row in rows if row not in self._rows]
                chosen = chosen or quickest(rows)
        for variant in self._made_here if thorough else ():
            if chosen is None or variant != chosen.variant:
                self._packages.discard(variant)
        return self._selection(chosen)

    def _known(self, units: str) -> list[Tried]:
        """Returns the kept verdicts on the packages that exist, if one of them is good."""
        rows = []
        for variant in filter(self._packages.made, self._packages.variants):
            package = self._packages.get(variant)
            verdict = self._verdicts.find(package, units)
            rows += [] if verdict is None else [Tried.of(package, verdict)]
        return rows if quickest(rows) else []

    def _try_until_good(self, units: str) -> list[Tried]:
        rows: list[Tried] = []
        while len(rows) < len(self._packages.variants) and not (rows and (rows[-1].verdict.good or _final(rows))):
            rows += self._try(units, len(rows))
        return rows

    def _try_all(self, units: str) -> list[Tried]:
        rows: list[Tried] = []
        while len(rows) < len(self._packages.variants) and not _final(rows):
            rows += self._try(units, len(rows))
        return rows

    def _try(self, units: str, number: int) -> list[Tried]:
        """Returns the verdict on one variant: a kept one, or that of a trial now."""
        variant = self._packages.variants[number]
        try:
            package = self._packages.get(variant)
        except ModelError as error:
            if number == 0:
                raise
            return [Tried(variant, 0, "", ProbeVerdict(units, None, str(error)))]
        verdict = self._verdicts.find(package, units)
        if verdict is None:
            self._tell(f"trying Core ML on {units} with this draft, {variant} (once)")
            verdict = self._attempt(package, units)
            self._verdicts.add(Tried.of(package, verdict))
        return [Tried.of(package, verdict)]

    def _selection(self, chosen: Tried | None) -> Selection:
        bad = "; ".join(
            f"{row.verdict.units}, {row.variant}: {row.verdict.reason}" for row in self._rows if not row.verdict.good
        )
        if chosen is None or chosen.verdict.trial is None:
            sentence = f"Core ML does not help this draft on this machine; drafting with MLX instead ({bad})"
            return Selection(None, None, sentence, tuple(self._rows))
        units, ms = chosen.verdict.units, chosen.verdict.trial.ms["q1"]
        sentence = f"drafting with Core ML on {units}, {chosen.variant}, {ms:.2f} ms a token"
        package = self._packages.get(chosen.variant)
        return Selection(package, units, f"{sentence} ({bad})" if bad else sentence, tuple(self._rows))


def quickest(rows: Sequence[Tried]) -> Tried | None:
    """Returns the first good row, unless a later one is faster by a tenth; None if none is good."""
    best: Tried | None = None
    for row in rows:
        trial = row.verdict.trial
        if not row.verdict.good or trial is None:
            continue
        if best is None or best.verdict.trial is None or _cost(trial) < _WORTH_A_CHANGE * _cost(best.verdict.trial):
            best = row
    return best


def _cost(trial: Trial) -> float:
    return mean(trial.ms[name] for name in _WEIGHED)


def _final(rows: Sequence[Tried]) -> bool:
    return bool(rows) and rows[-1].verdict.final


def place(packages: PackageSource, tell: Tell) -> Selection:
    """Returns the package and unit for this machine, by the trials, or without Core ML the interpreter.

    Raises:
        ModelError: no package can be made.
    """
    if sys.platform == "darwin":
        return choose(packages, converter.probes(), tell)
    return Selection(packages.get(packages.variants[0]), REFERENCE, f"drafting with {NumpyRuntime.name}", ())


def packages_of(checkpoint: Path, tell: Tell = log.info) -> OfCheckpoint:
    """Returns the packages of a model directory in this machine's cache; `tell` gets the stages of conversions."""
    return OfCheckpoint.of(checkpoint, context_of(checkpoint), _stages(tell))


def checkpoint_of(model: str, tell: Tell = log.info) -> Path:
    """Returns the directory of a model, given as a directory or a Hugging Face id. Raises ModelError if it is
    neither."""
    from outrider.engine.loading import find

    return find(model, tell)


def context_of(checkpoint: Path) -> int:
    """Returns the default context, or the model's own if that is shorter."""
    from mlx_lm.utils import load_config

    return min(converter.DEFAULT_CONTEXT, read_architecture(load_config(checkpoint)).max_positions)


def _stages(tell: Tell) -> converter.Progress:
    """Returns a callback that reports each stage of a conversion once."""
    reported: set[str] = set()

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in reported:
            reported.add(stage)
            tell(f"converting the draft for Core ML: {stage}")

    return progress
