"""`training.json` of a head: its recipe, training text, and held-out files. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from models.training.heads.recipe import HeadRecipe
from models.training.record import FILE_NAME


@dataclass(frozen=True, slots=True)
class HeadRecord:
    """The record of a finished run. `held_out_agreement`: by step, how often the head's best token equals the target's
    on text that the target wrote after the `held_out` files, given true tokens before it."""

    recipe: HeadRecipe
    target: str  # digest of its config and weights
    python: str
    torch: str
    files: int
    parameters: int
    tokens_seen: int
    held_out_agreement: tuple[float, ...]
    held_out: tuple[str, ...]

    def write(self, head: Path) -> None:
        """Writes `training.json` into the folder of the head."""
        (head / FILE_NAME).write_text(json.dumps(asdict(self), indent=1) + "\n")
