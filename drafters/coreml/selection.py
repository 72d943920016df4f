"""Chooses the package of a draft and the compute unit of this machine that runs it, by trials that are kept.

At first use, trials end with the first good one; a thorough selection tries everything and takes the fastest. The
Neural Engine comes first, because a drafter there slows the target least; then the CPU; then MLX.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from mlx_lm.utils import load_config

from outrider.drafters.coreml import layout, package, runtimes, trial
from outrider.drafters.coreml.converter import Progress, convert
from outrider.drafters.coreml.layout import DEFAULT_CONTEXT, Mode, Options
from outrider.drafters.coreml.package import Package, fingerprint, open_package
from outrider.drafters.coreml.trial import Trial, Trials, Tried
from outrider.protocol.errors import ModelError

log = logging.getLogger(__name__)

PREFERRED = ("CPU_AND_NE", "CPU_ONLY")
FORMS = tuple((mode, weights) for weights in ("fp16", "int8") for mode in Mode)
"""In the order of trials: the draft's own numbers first, and the modes that the Neural Engine accepts most often."""
_WEIGHED = ("q1", "q8", "q16")  # the functions that a round of drafting calls
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
        self.checkpoint, self.source_hash, self._tell = checkpoint, fingerprint(checkpoint), tell
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
                convert(self.checkpoint, directory, variant, _stages(self._tell))
            except ModelError:
                if not directory.exists():  # otherwise another process has made it meanwhile
                    raise
        return open_package(directory, source=self.checkpoint)

    def discard(self, variant: Options) -> None:
        """Removes a package, which can be converted again."""
        shutil.rmtree(self._directory(variant), ignore_errors=True)

    def _directory(self, variant: Options) -> Path:
        key = f"{self.source_hash[:16]}-{variant.mode.value}-{variant.weights}-{variant.context}"
        return package.folder() / f"{key}-f{package.FORMAT}"


def _stages(tell: Tell) -> Progress:
    """Returns a callback that reports each stage of a conversion once."""
    reported: set[str] = set()

    def progress(stage: str, done: int, total: int) -> None:
        if stage not in reported:
            reported.add(stage)
            tell(f"converting the draft for Core ML: {stage}")

    return progress


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
    chosen: tuple[Tried, Trial] | None = None
    for units in PREFERRED:
        if chosen is None or thorough:
            known = [] if thorough else _known(packages, kept, units)
            tried = known if quickest(known) else _try(packages, kept, units, tell, thorough)
            chosen = chosen or quickest(tried)
            rows += tried
    for form in new if thorough else ():
        if chosen is None or form != chosen[0].options:
            packages.discard(form)
    bad = "; ".join(f"{row.units}, {row.options}: {row.reason}" for row in rows if row.reason)
    if chosen is None:
        return Selection(f"Core ML does not help this draft on this machine; drafting with MLX instead ({bad})")
    row, found = chosen
    sentence = f"drafting with Core ML on {row.units}, {row.options}, {found.ms['q1']:.2f} ms a token"
    return Selection(f"{sentence} ({bad})" if bad else sentence, packages.get(row.options), row)


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


def quickest(rows: Sequence[Tried]) -> tuple[Tried, Trial] | None:
    """Returns the first good row, unless a later one is faster by a tenth; None if none is good."""
    best: tuple[Tried, Trial] | None = None
    for row in rows:
        if row.trial is None or row.reason:
            continue
        if best is None or _cost(row.trial) < _WORTH_A_CHANGE * _cost(best[1]):
            best = row, row.trial
    return best


def _cost(trial: Trial) -> float:
    return mean(trial.ms[name] for name in _WEIGHED)
