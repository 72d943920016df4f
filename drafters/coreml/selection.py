"""Chooses the package of a draft and the compute unit of this machine that runs it, by trials that are kept."""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from outrider.drafters.coreml import layout, package, runtimes, trial
from outrider.drafters.coreml.converter import write_error, write_package
from outrider.drafters.coreml.drafter import CoreMLDrafter, PackageReader
from outrider.drafters.coreml.layout import DEFAULT_CONTEXT, Options
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import open_runtime
from outrider.drafters.coreml.trial import TrialResult, TrialStore
from outrider.drafters.drafter import Drafter
from outrider.engine.loading import find_model_folder, read_config
from outrider.protocol.digest import cache_folder, make_cached, model_digest, use_cached
from outrider.protocol.errors import InvalidRequest, ModelError

log = logging.getLogger(__name__)

PREFERRED_UNITS = ("CPU_AND_NE", "CPU_ONLY")
TRIED_WEIGHTS = ("fp16", "int8")  # in the order of trials
_MAX_COST_RATIO = 0.9  # a later variant must take less than this share of the time of an earlier one

ProgressCallback = Callable[[str], None]


class Packages:
    """The packages of the model directory `checkpoint`, converted when they are needed and kept in the cache.

    `variants`: their forms, in the order of trials, of DEFAULT_CONTEXT or the model's own context if that is shorter.
    """

    def __init__(self, checkpoint: Path, progress: ProgressCallback = log.info) -> None:
        """`progress` receives each stage of a conversion once."""
        self.checkpoint, self.source_hash, self._progress = checkpoint, model_digest(checkpoint), progress
        context = min(DEFAULT_CONTEXT, layout.read_architecture(read_config(checkpoint)).max_positions)
        self.variants = tuple(Options(weights, context) for weights in TRIED_WEIGHTS)

    def is_converted(self, variant: Options) -> bool:
        """Whether the package exists already."""
        return self._directory(variant).exists()

    def get(self, variant: Options) -> Package:
        """Returns the package, converted now if it is missing or damaged. Raises ModelError if that fails."""
        package.import_coremltools()  # without it no package can be opened
        directory = self._directory(variant)
        if use_cached(directory, package.MANIFEST_FILE):
            try:
                return open_package(directory, source=self.checkpoint)
            except ModelError as error:  # the system may delete files of a cache
                log.warning("%s (converting it again now)", error)
                self.discard(variant)
        convert = partial(write_package, self.checkpoint, options=variant, progress=self._on_progress)
        try:
            make_cached(directory, convert, package.MANIFEST_FILE)
        except OSError as error:
            raise write_error(directory, error) from error
        return open_package(directory, source=self.checkpoint)

    def discard(self, variant: Options) -> None:
        """Removes a package, which can be converted again."""
        shutil.rmtree(self._directory(variant), ignore_errors=True)

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        if not done:
            self._progress(f"converting the draft for Core ML: {stage}")

    def _directory(self, variant: Options) -> Path:
        key = f"{self.source_hash}-{variant.weights}-{variant.context}"
        return cache_folder() / "coreml" / "packages" / f"{key}.{package.MANIFEST_FORMAT}"


class OnePackage:
    """A `PackageSource` with a single package, which the user named and which is never removed."""

    def __init__(self, package: Package) -> None:
        self.package, self.source_hash, self.variants = package, package.manifest.source_hash, (package.options,)

    def is_converted(self, variant: Options) -> bool:
        return True

    def get(self, variant: Options) -> Package:
        return self.package

    def discard(self, variant: Options) -> None:
        """Does nothing: the package belongs to the user."""


PackageSource = Packages | OnePackage
"""The packages of a draft on this machine."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen package and its results on the chosen unit, or None; `sentence` explains the choice to users."""

    sentence: str
    package: Package | None = None
    row: TrialResult | None = None


def select_package(packages: PackageSource, progress: ProgressCallback, thorough: bool = False) -> Selection:
    """Returns the package and unit to draft with: of the first good trial, or if `thorough` the fastest of all.

    The Neural Engine comes first, because a drafter there slows the target least; then the CPU; then MLX.

    Args:
        progress: receives a sentence before each trial, which may take minutes.
        thorough: try every package on every unit; packages converted only for this are removed again.

    Raises:
        ModelError: no package of the draft can be made.
    """
    if reason := runtimes.unavailable_reason():
        return Selection(reason)
    kept = TrialStore(packages.source_hash)
    new = [form for form in packages.variants if not packages.is_converted(form)]
    rows: list[TrialResult] = []
    chosen: TrialResult | None = None
    for units in PREFERRED_UNITS:
        if chosen is None or thorough:
            converted = [] if thorough else list(filter(packages.is_converted, packages.variants))
            known = [row for form in converted if (row := kept.find(packages.get(form), units)) is not None]
            tried = known if select_fastest(known) else _run_trials(packages, kept, units, progress, thorough)
            chosen = chosen or select_fastest(tried)
            rows += tried
    for form in new if thorough else ():
        if chosen is None or form != chosen.options:
            packages.discard(form)
    rejections = "; ".join(f"{row.units}, {row.options.weights}: {row.reason}" for row in rows if row.reason)
    if chosen is None or chosen.trial is None:
        return Selection(f"Core ML does not help this draft on this machine ({rejections})")
    sentence = (
        f"drafting with Core ML on {chosen.units}, {chosen.options.weights}, {chosen.trial.ms['q1']:.2f} ms a token"
    )
    return Selection(f"{sentence} ({rejections})" if rejections else sentence, packages.get(chosen.options), chosen)


def _run_trials(
    packages: PackageSource, kept: TrialStore, units: str, progress: ProgressCallback, thorough: bool
) -> list[TrialResult]:
    """Tries the packages in order, up to the first good one or, if `thorough`, all. Returns kept and new results."""
    rows: list[TrialResult] = []
    for form in packages.variants:
        try:
            package = packages.get(form)
        except ModelError as error:
            if not rows:
                raise
            rows.append(TrialResult(form, "", units, reason=str(error)))
            continue
        row = kept.find(package, units)
        if row is None:
            progress(f"trying Core ML on {units} with this draft, {form.weights} (once)")
            row = trial.run_trial(package, units)
            kept.add(row)
        rows.append(row)
        if row.final or not (row.reason or thorough):
            break
    return rows


def select_fastest(rows: Sequence[TrialResult]) -> TrialResult | None:
    """Returns the first good row, unless a later one is faster by a tenth; None if none is good."""
    best: TrialResult | None = None
    for row in rows:
        if row.cost < (math.inf if best is None else _MAX_COST_RATIO * best.cost):
            best = row
    return best


def load_drafter(model: str, progress: ProgressCallback) -> Drafter:
    """Returns the drafter for `model`: a package directory or a model directory.

    A model is converted first (once). MLX drafts, with a note, if trials fail on every unit, or there is no Core ML.
    `progress` receives a sentence about each step.

    Raises:
        ModelError: there is no such model, the converter refuses it, or a package without its model can't run here.
    """
    directory, checkpoint = Path(os.path.expanduser(model)), None
    packages: PackageSource
    if (directory / package.MANIFEST_FILE).is_file():
        packages = OnePackage(open_package(directory))
    else:
        checkpoint = find_model_folder(model)
        packages = Packages(checkpoint, progress)
    chosen = select_package(packages, progress)
    reason = chosen.sentence
    if chosen.package is not None and chosen.row is not None:
        progress(chosen.sentence)
        try:
            return CoreMLDrafter(chosen.package, open_runtime(chosen.package, chosen.row.units), note=chosen.sentence)
        except ModelError as error:  # although its trial succeeded before
            reason = str(error)
    if checkpoint is None:
        raise ModelError(f"{reason}; give the model that this package was converted from, not the package")
    from outrider.drafters.mlx import MlxDrafter

    note = f"drafting with MLX instead of Core ML: {reason}"
    progress(note)
    return MlxDrafter.load(str(checkpoint), progress, note)


def load_prompt_reader(model: str, prefill: str, progress: ProgressCallback) -> PackageReader | str:
    """Returns the package that reads prompts for the draft `model`, or why MLX reads them; empty if it was to.

    `prefill` is the setting `draft_prefill`: `mlx`, `coreml`, or the directory of a package.

    Raises:
        InvalidRequest: `prefill` is neither mlx nor coreml nor a package's directory.
        ModelError: the package has other weights, or the draft can't be converted.
    """
    packages: PackageSource
    match prefill:
        case "mlx":
            return ""
        case "coreml":
            packages = Packages(find_model_folder(model), progress)
        case _:
            directory = Path(os.path.expanduser(prefill))
            if not (directory / package.MANIFEST_FILE).is_file():
                raise InvalidRequest(
                    f"draft prefill is {prefill!r}; expected mlx, coreml or the directory of a package"
                )
            packages = OnePackage(open_package(directory, find_model_folder(model)))
    chosen = select_package(packages, progress)
    if chosen.package is None or chosen.row is None:
        return f"prompts are read by MLX: {chosen.sentence}"
    try:
        runtime = open_runtime(chosen.package, chosen.row.units, [chosen.package.layout.prefill.name])
    except ModelError as error:
        return f"prompts are read by MLX: {error}"
    reader = PackageReader(chosen.package, runtime)
    progress(reader.note)
    return reader
