"""Chooses the package of a draft and the compute unit of this machine that runs it, by trials that are kept.

At first use, trials end with the first good one; a thorough selection tries everything and takes the fastest. The
Neural Engine comes first, because a drafter there slows the target least; then the CPU; then MLX. `load` returns the
drafter of the package, or of MLX.

`reader_for` returns the package that reads prompts for a draft on MLX, by the setting `draft_prefill`: `auto` (the
package for prompts that it was measured to read faster, see `prompt_times`), `mlx` (never), `coreml` (always), or the
directory of a package (always that one).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlx_lm.utils import load_config

from outrider.drafters.coreml import layout, package, runtimes, trial
from outrider.drafters.coreml.converter import convert
from outrider.drafters.coreml.drafter import CoreMLDrafter, PackageReader
from outrider.drafters.coreml.layout import DEFAULT_CONTEXT, Mode, Options
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import open_runtime
from outrider.drafters.coreml.trial import PromptTimes, Trials, Tried
from outrider.drafters.drafter import Drafter
from outrider.engine.loading import find
from outrider.protocol.digest import digest
from outrider.protocol.errors import InvalidRequest, ModelError

log = logging.getLogger(__name__)

PREFERRED = ("CPU_AND_NE", "CPU_ONLY")
FORMS = tuple((mode, weights) for weights in ("fp16", "int8") for mode in Mode)
"""In the order of trials: the draft's own numbers first, and the modes that the Neural Engine accepts most often."""
_WORTH_A_CHANGE = 0.9  # of the time of an earlier variant

Tell = Callable[[str], None]


class Packages:
    """The packages of the model directory `checkpoint`, converted when they are needed and kept in the cache.

    `variants`: their forms, in the order of trials, of DEFAULT_CONTEXT or the model's own context if that is shorter.
    """

    def __init__(self, checkpoint: Path, tell: Tell = log.info) -> None:
        """
        Args:
            tell: receives each stage of a conversion once.
        """
        self.checkpoint, self.source_hash, self._tell = checkpoint, digest(checkpoint), tell
        context = min(DEFAULT_CONTEXT, layout.read(load_config(checkpoint)).max_positions)
        self.variants = tuple(Options(mode, weights, context) for mode, weights in FORMS)

    def made(self, variant: Options) -> bool:
        """Whether the package exists already."""
        return self._directory(variant).exists()

    def get(self, variant: Options) -> Package:
        """Returns the package, converted now if necessary. Raises ModelError if that fails."""
        directory = self._directory(variant)
        if not directory.exists():
            try:
                convert(self.checkpoint, directory, variant, self._on_progress)
            except ModelError:
                if not directory.exists():  # otherwise another process has made it meanwhile
                    raise
        return open_package(directory, source=self.checkpoint)

    def discard(self, variant: Options) -> None:
        """Removes a package, which can be converted again."""
        shutil.rmtree(self._directory(variant), ignore_errors=True)

    def _on_progress(self, stage: str, done: int, total: int) -> None:
        if not done:
            self._tell(f"converting the draft for Core ML: {stage}")

    def _directory(self, variant: Options) -> Path:
        key = f"{self.source_hash}-{variant.mode.value}-{variant.weights}-{variant.context}"
        return package.folder() / f"{key}-f{package.FORMAT}"


class OnePackage:
    """Stands for `Packages` of a single package that was named, and is never removed."""

    def __init__(self, package: Package) -> None:
        self.package, self.source_hash, self.variants = package, package.manifest.source_hash, (package.options,)

    def made(self, variant: Options) -> bool:
        return True

    def get(self, variant: Options) -> Package:
        return self.package

    def discard(self, variant: Options) -> None:
        """Does nothing: the package belongs to the user."""


PackageSource = Packages | OnePackage
"""The packages of a draft on this machine."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The package to use and its results on the unit to use, None for none; `sentence` has the reasons, for users."""

    sentence: str
    package: Package | None = None
    row: Tried | None = None


def choose(packages: PackageSource, tell: Tell, thorough: bool = False) -> Selection:
    """Returns the package and unit to draft with.

    Args:
        tell: receives a sentence before each trial, which may take minutes.
        thorough: try every package on every unit; packages made only for that are removed again.

    Raises:
        ModelError: no package of the draft can be made.
    """
    if not runtimes.available():
        return Selection(f"{runtimes.ABSENT}; drafting with MLX instead")
    kept, new = Trials(packages.source_hash), [form for form in packages.variants if not packages.made(form)]
    rows: list[Tried] = []
    chosen: Tried | None = None
    for units in PREFERRED:
        if chosen is None or thorough:
            known = [] if thorough else _known(packages, kept, units)
            tried = known if quickest(known) else _try(packages, kept, units, tell, thorough)
            chosen = chosen or quickest(tried)
            rows += tried
    for form in new if thorough else ():
        if chosen is None or form != chosen.options:
            packages.discard(form)
    bad = "; ".join(f"{row.units}, {row.options}: {row.reason}" for row in rows if row.reason)
    if chosen is None or chosen.trial is None:
        return Selection(f"Core ML does not help this draft on this machine; drafting with MLX instead ({bad})")
    sentence = f"drafting with Core ML on {chosen.units}, {chosen.options}, {chosen.trial.ms['q1']:.2f} ms a token"
    return Selection(f"{sentence} ({bad})" if bad else sentence, packages.get(chosen.options), chosen)


def _known(packages: PackageSource, kept: Trials, units: str) -> list[Tried]:
    """Returns the kept results of the packages that exist."""
    made = [packages.get(form) for form in packages.variants if packages.made(form)]
    return [row for package in made if (row := kept.find(package, units)) is not None]


def _try(packages: PackageSource, kept: Trials, units: str, tell: Tell, thorough: bool) -> list[Tried]:
    """Returns the results, kept or new, of the packages up to the first good one, or of all that are worth a trial."""
    rows: list[Tried] = []
    for form in packages.variants:
        try:
            package = packages.get(form)
        except ModelError as error:
            if not rows:
                raise
            rows.append(Tried(form, "", units, reason=str(error)))
            continue
        row = kept.find(package, units)
        if row is None:
            tell(f"trying Core ML on {units} with this draft, {form} (once)")
            row = trial.try_out(package, units)
            kept.add(row)
        rows.append(row)
        if row.final or not (row.reason or thorough):
            break
    return rows


def quickest(rows: Sequence[Tried]) -> Tried | None:
    """Returns the first good row, unless a later one is faster by a tenth; None if none is good."""
    best: Tried | None = None
    for row in rows:
        if row.cost < (math.inf if best is None else _WORTH_A_CHANGE * best.cost):
            best = row
    return best


def load(model: str, tell: Tell) -> Drafter:
    """Returns the drafter for `model`: a package directory, a model directory or a Hugging Face id.

    A model is converted first (once). MLX drafts if Core ML's trials fail on every unit, or there is no Core ML. `tell`
    receives a sentence about each.

    Raises:
        ModelError: there is no such model, the converter refuses it, or a package without its model can't run here.
    """
    directory, checkpoint = Path(model).expanduser(), None
    packages: PackageSource
    if (directory / package.MANIFEST).is_file():
        packages = OnePackage(open_package(directory))
    else:
        checkpoint = find(model)
        packages = Packages(checkpoint, tell)
    chosen = choose(packages, tell)
    sentence = chosen.sentence
    tell(sentence)
    if chosen.package is not None and chosen.row is not None:
        try:
            return CoreMLDrafter(chosen.package, open_runtime(chosen.package, chosen.row.units), note=sentence)
        except ModelError as error:  # although its trial succeeded before
            sentence = f"{error}, drafting with MLX instead"
            tell(sentence)
    if checkpoint is None:
        raise ModelError(f"{sentence}; give the model that this package was converted from, not the package")
    from outrider.drafters.mlx import MlxDrafter

    return MlxDrafter.load(str(checkpoint), tell)


def reader_for(model: str, prefill: str, tell: Tell) -> PackageReader | None:
    """Returns the package that reads prompts for the draft `model`; None: MLX does.

    Raises:
        InvalidRequest: `prefill` is neither one of the words nor a package.
        ModelError: the package has other weights, or the draft can't be converted.
    """
    packages: PackageSource
    match prefill:
        case "mlx":
            return None
        case "auto":
            return _if_faster(model, tell)
        case "coreml":
            packages = Packages(find(model), tell)
        case _:
            directory = Path(prefill).expanduser()
            if not (directory / package.MANIFEST).is_file():
                raise InvalidRequest(
                    f"draft prefill is {prefill!r}; expected auto, mlx, coreml or the directory of a package"
                )
            packages = OnePackage(open_package(directory, find(model)))
    chosen = choose(packages, tell)
    if chosen.package is None or chosen.row is None:
        tell(f"prompts are read by MLX: {chosen.sentence}")
        return None
    return _reader(chosen.package, chosen.row.units, 1, tell)


def _if_faster(model: str, tell: Tell) -> PackageReader | None:
    """Returns the package that a kept measurement found faster than MLX, if it still exists."""
    if not runtimes.available():
        return None
    try:
        checkpoint = find(model)
        for row in Trials(digest(checkpoint)).rows:
            times = row.prompts_here
            if times is not None and times.least is not None:
                packages = Packages(checkpoint, tell)
                made = packages.get(row.options) if packages.made(row.options) else None
                if made is not None and made.manifest.key == row.key:
                    return _reader(made, row.units, times.least, tell)
    except ModelError as error:  # `auto` may find no package
        tell(f"prompts are read by MLX: {error}")
    return None


def _reader(package: Package, units: str, least: int, tell: Tell) -> PackageReader | None:
    try:
        runtime = open_runtime(package, units, [package.layout.prefill.name])
    except ModelError as error:
        tell(f"prompts are read by MLX: {error}")
        return None
    reader = PackageReader(package, runtime, least)
    tell(reader.note)
    return reader


def prompt_times(packages: Packages, tell: Tell) -> PromptTimes:
    """Returns the kept times of the package and unit that a drafter would run on this machine, or measures them.

    Raises:
        ModelError: no package of the draft can be made.
    """
    chosen = choose(packages, tell)
    if chosen.package is None or chosen.row is None:
        return PromptTimes("no unit", "", reason=chosen.sentence)
    times = chosen.row.prompts_here
    if times is None:
        times = trial.time_prompts(chosen.package, chosen.row.units, packages.checkpoint)
        Trials(packages.source_hash).add(dataclasses.replace(chosen.row, prompts=times))
    return times
