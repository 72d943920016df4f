"""A package's manifest: what it was made from, what is in it, and the hashes that hold it to its files.

The only file of a package that a person reads. Knows JSON; knows nothing of graphs.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.drafting.coreml.package.architecture import Architecture
from outrider.drafting.coreml.package.layout import Function, Layout, Mode
from outrider.protocol.errors import ModelError

FORMAT = 1
FILE = "manifest.json"


@dataclass(frozen=True, slots=True)
class Manifest:
    """`source_hash` is `source.fingerprint` of the checkpoint; `files` maps a path in the package to its SHA-256."""

    layout: Layout
    source: str
    source_hash: str
    parameters: int
    files: dict[str, str]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()
    format: int = field(default=FORMAT)

    @property
    def key(self) -> str:
        """Names the package's content: the same for the same weights, layout and converter."""
        return self.files["model.mlpackage/weights"][:16] + self.files["model.mlpackage/model"][:16]

    def write(self, directory: Path) -> None:
        text = json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)
        (directory / FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of the package in `directory`.

        Raises:
            ModelError: there is none, or it is of another format, or it is not a manifest.
        """
        path = directory / FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{directory} is not a converted model ({error}); create one with `outrider convert`"
            ) from error
        found = fields.get("format") if isinstance(fields, dict) else None
        if found != FORMAT:
            raise ModelError(f"{path} has format {found!r}; this version reads {FORMAT}: convert the model again")
        try:
            return cls(**{**fields, "layout": _layout(fields["layout"]), "notes": tuple(fields["notes"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path} is not a manifest ({error}); convert the model again") from error


def _layout(fields: dict[str, Any]) -> Layout:
    return Layout(
        architecture=Architecture(**fields["architecture"]),
        mode=Mode(fields["mode"]),
        weights=str(fields["weights"]),
        context=int(fields["context"]),
        slots=int(fields["slots"]),
        functions=tuple(Function(**function) for function in fields["functions"]),
    )
