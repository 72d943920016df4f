"""Which package of a draft runs on which compute unit here: tried out once, remembered, chosen by time.

At first use the tries end with the first good one; a thorough selection tries everything and takes the quickest. The
Neural Engine comes first, because there the drafter costs the target least; then the CPU; then none, which means MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.trials import probe
from outrider.drafting.coreml.trials.packages import Packages
from outrider.drafting.coreml.trials.probe import PREFERRED, Verdict
from outrider.drafting.coreml.trials.trial import Trial
from outrider.drafting.coreml.trials.verdicts import Tried, Verdicts
from outrider.protocol.errors import ModelError

_WEIGHED = ("q1", "q8", "q16")  # what a round of drafting calls
_WORTH_A_CHANGE = 0.9  # of the time of what is tried earlier

Try = Callable[[Package, str], Verdict]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """`package` and `units` to use, None for none; `sentence` says so to a person, with the reasons."""

    package: Package | None
    units: str | None
    sentence: str
    tried: tuple[Tried, ...]


def choose(
    packages: Packages, memory: Path, tell: Tell, thorough: bool = False, attempt: Try = probe.try_out
) -> Selection:
    """The package and unit to draft with.

    Args:
        memory: directory where verdicts are kept.
        tell: gets a sentence before each trial, which may take minutes.
        thorough: try every package on every unit; those made only for that are removed again.

    Raises:
        ModelError: not one package of the draft can be made.
    """
    return _Selector(packages, Verdicts(memory, packages.source_hash), tell, attempt).choose(thorough)


class _Selector:
    def __init__(self, packages: Packages, verdicts: Verdicts, tell: Tell, attempt: Try) -> None:
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
        """What is remembered of the packages that are there, if one of them is good."""
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
        """The verdict of one variant: remembered, or found now."""
        variant = self._packages.variants[number]
        try:
            package = self._packages.get(variant)
        except ModelError as error:
            if number == 0:
                raise
            return [Tried(variant, 0, "", Verdict(units, None, str(error)))]
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
    """The first good row, unless a later one is quicker by a tenth; None when none is good."""
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
