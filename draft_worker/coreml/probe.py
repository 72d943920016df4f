"""Which compute unit a package runs on here: each is tried once, in a process that may die, and remembered.

What is remembered holds for one build of macOS, one package and one coremltools; any change tries again.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draft_worker.coreml.coreml_runtime import os_build
from draft_worker.coreml.package import Package
from draft_worker.coreml.trial import Trial

PREFERRED = ("CPU_AND_NE", "CPU_ONLY")
PREDICTIONS = 300
_TIMEOUT_SECONDS = 900.0  # a first compile for the Neural Engine can take minutes
_LEAST_AGREEMENT = 0.9
_MOST_DISTANCE = 0.05


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one unit's trial ended: `trial` when it came to an end, `reason` when the unit is not to be used."""

    units: str
    trial: Trial | None
    reason: str = ""

    @property
    def good(self) -> bool:
        return not self.reason


@dataclass(frozen=True, slots=True)
class Choice:
    """`units` to use, None for none; `sentence` says so to a person, with the reasons."""

    units: str | None
    sentence: str
    verdicts: tuple[Verdict, ...]


Try = Callable[[Package, str], Verdict]


def choose(package: Package, memory: Path, attempt: Try | None = None) -> Choice:
    """The first unit of PREFERRED whose trial is good.

    Args:
        memory: directory where verdicts are kept.
        attempt: tries one unit; the default does so in a subprocess.
    """
    known = recall(package, memory)
    verdicts: list[Verdict] = []
    for units in PREFERRED:
        verdict = known.get(units) or (attempt or try_out)(package, units)
        verdicts.append(verdict)
        known[units] = verdict
        _remember(package, memory, known)
        if verdict.good:
            break
    return _choice(verdicts)


def recall(package: Package, memory: Path) -> dict[str, Verdict]:
    """The verdicts kept for this package on this machine, by unit."""
    try:
        kept = json.loads(_file(package, memory).read_text(encoding="utf-8"))
        return {units: _verdict(fields) for units, fields in kept.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or no longer readable: try again
        return {}


def try_out(package: Package, units: str, predictions: int = PREDICTIONS) -> Verdict:
    """Runs the trial of `units` in a subprocess."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "trial.json"
        command = trial_command(package, units, predictions, result)
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return Verdict(units, None, f"its trial was still running after {_TIMEOUT_SECONDS:.0f} seconds")
        if not result.is_file():
            return Verdict(units, None, _ending(done))
        return judge(Trial(**json.loads(result.read_text(encoding="utf-8"))))


def trial_command(package: Package, units: str, predictions: int, result: Path) -> list[str]:
    """The command line of a trial."""
    module = [sys.executable, "-m", "draft_worker.coreml.trial", "--package", str(package.path), "--units", units]
    return [*module, "--predictions", str(predictions), "--result", str(result)]


def judge(trial: Trial) -> Verdict:
    """Holds a finished trial to the agreement gate."""
    if not trial.agreement >= _LEAST_AGREEMENT:  # NaN is not either
        reason = f"it agreed with the reference on {trial.agreement:.0%} of tokens; expected {_LEAST_AGREEMENT:.0%}"
    elif not trial.distance <= _MOST_DISTANCE:
        reason = f"its distributions are {trial.distance:.3f} from the reference; expected at most {_MOST_DISTANCE}"
    else:
        reason = ""
    return Verdict(trial.units, trial, reason)


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its trial was ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return f"its trial failed: {lines[-1]}" if lines else f"its trial failed with exit code {done.returncode}"


def _choice(verdicts: list[Verdict]) -> Choice:
    bad = "; ".join(f"{verdict.units}: {verdict.reason}" for verdict in verdicts if not verdict.good)
    last = verdicts[-1]
    if not last.good or last.trial is None:
        sentence = f"Core ML is of no use for this draft here, drafting with MLX instead ({bad})"
        return Choice(None, sentence, tuple(verdicts))
    single = next(iter(last.trial.ms.values()), 0.0)
    sentence = f"drafting with Core ML on {last.units}, {single:.2f} ms a token"
    return Choice(last.units, f"{sentence} ({bad})" if bad else sentence, tuple(verdicts))


def _remember(package: Package, memory: Path, verdicts: dict[str, Verdict]) -> None:
    memory.mkdir(parents=True, exist_ok=True)
    kept = {units: dataclasses.asdict(verdict) for units, verdict in verdicts.items()}
    _file(package, memory).write_text(json.dumps(kept, indent=1), encoding="utf-8")


def _file(package: Package, memory: Path) -> Path:
    return memory / f"{package.manifest.key}-{os_build()}-coremltools{version('coremltools')}.json"


def _verdict(fields: dict[str, Any]) -> Verdict:
    trial = fields["trial"]
    return Verdict(str(fields["units"]), None if trial is None else Trial(**trial), str(fields["reason"]))
