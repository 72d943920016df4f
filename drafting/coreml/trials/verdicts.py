"""What trials on this machine showed, kept between runs.

A verdict holds for one package, by its hash, one build of macOS and one coremltools; any change tries again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from outrider.drafting.coreml.package.layout import Mode
from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.runtime.coreml_runtime import os_build
from outrider.drafting.coreml.trials.probe import Verdict
from outrider.drafting.coreml.trials.trial import Trial

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to make a package of a draft."""

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
    verdict: Verdict

    @classmethod
    def of(cls, package: Package, verdict: Verdict) -> Tried:
        layout = package.layout
        return cls(Variant(layout.mode, layout.weights), layout.context, package.manifest.key, verdict)


class Verdicts:
    """The verdicts kept in `folder` for the draft whose weights have the hash `source_hash`."""

    def __init__(self, folder: Path, source_hash: str) -> None:
        self._file = folder / f"{source_hash[:16]}-{os_build()}-coremltools{version('coremltools')}.json"
        self.rows: list[Tried] = read(self._file, _tried)

    def find(self, package: Package, units: str) -> Verdict | None:
        found = [row for row in self.rows if row.key == package.manifest.key and row.verdict.units == units]
        return found[-1].verdict if found else None

    def add(self, row: Tried) -> None:
        known = (row.key, row.verdict.units)
        self.rows = [other for other in self.rows if (other.key, other.verdict.units) != known] + [row]
        write(self._file, [dataclasses.asdict(kept) for kept in self.rows])


def read(file: Path, parse: Callable[[Any], Row]) -> list[Row]:
    """The rows of `file`; none when it is not there or can no longer be read: what it told is found out again."""
    try:
        return [parse(fields) for fields in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    """All of `rows` or, for whoever reads meanwhile, all of those before."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    partial.replace(file)


def _tried(fields: dict[str, Any]) -> Tried:
    told = fields["verdict"]
    trial = None if told["trial"] is None else Trial(**told["trial"])
    verdict = Verdict(str(told["units"]), trial, str(told["reason"]), bool(told["final"]))
    variant = Variant(Mode(fields["variant"]["mode"]), str(fields["variant"]["weights"]))
    return Tried(variant, int(fields["context"]), str(fields["key"]), verdict)
