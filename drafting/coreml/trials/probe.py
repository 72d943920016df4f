"""One package on one compute unit, tried out in a process that may die: good, or not and why."""

from __future__ import annotations

import json
from dataclasses import dataclass

from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.trials import sacrifice
from outrider.drafting.coreml.trials.trial import Trial

PREFERRED = ("CPU_AND_NE", "CPU_ONLY")
PREDICTIONS = 300
MODULE = "outrider.drafting.coreml.trials.trial"
_SECONDS = 900.0  # a first compile for the Neural Engine can take minutes
_LEAST_AGREEMENT = 0.9
_MOST_DISTANCE = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one unit's trial ended: `trial` when it came to an end, `reason` when the unit is not to be used.

    `final`: no package will fare better on this unit, see `sacrifice.Ending`.
    """

    units: str
    trial: Trial | None
    reason: str = ""
    final: bool = False

    @property
    def good(self) -> bool:
        return not self.reason


def try_out(package: Package, units: str, predictions: int = PREDICTIONS) -> Verdict:
    """Runs the trial of `units` in a subprocess: compile, load, compare, predict, time."""
    ending = sacrifice.run(MODULE, arguments(package, units, predictions), _SECONDS)
    if ending.written is None:
        return Verdict(units, None, ending.reason, ending.final)
    return judge(Trial(**json.loads(ending.written)))


def arguments(package: Package, units: str, predictions: int) -> list[str]:
    """Of the trial's command line, all but the file for its result."""
    return ["--package", str(package.path), "--units", units, "--predictions", str(predictions)]


def judge(trial: Trial) -> Verdict:
    """Holds a finished trial to the agreement gate."""
    if not trial.agreement >= _LEAST_AGREEMENT:  # NaN is not either
        reason = f"it agreed with the reference on {trial.agreement:.0%} of tokens; expected {_LEAST_AGREEMENT:.0%}"
    elif not trial.distance <= _MOST_DISTANCE:
        reason = f"its distributions are {trial.distance:.3f} from the reference; expected at most {_MOST_DISTANCE}"
    else:
        reason = ""
    return Verdict(trial.units, trial, reason)
