"""`training.json` of a pair: its recipe, training text, and held-out files, which `evaluate.py` reads. Needs no
torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from models.training.recipe import Recipe
from outrider.protocol.errors import InvalidRequest

FILE_NAME = "training.json"


@dataclass(frozen=True, slots=True)
class Trained:
    """One model of the pair: the tokens it was trained on, and its held-out loss at full context in nats per token."""

    tokens_seen: int
    held_out_loss: float


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a finished run."""

    recipe: Recipe
    python: str
    torch: str
    files: int
    characters: int
    tokens: int
    target: Trained
    draft: Trained
    held_out: tuple[str, ...]

    def write(self, pair: Path) -> None:
        """Writes `training.json` into the folder of the pair."""
        (pair / FILE_NAME).write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Names of the held-out files of a pair, in the standard library of this Python version."""

    python: str
    names: tuple[str, ...]


def read_held_out(pair: Path) -> HeldOut | None:
    """Returns the held-out files of a pair, or None without a record. Raises InvalidRequest for a damaged one."""
    path = pair / FILE_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        python, names = content["python"], content["held_out"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is not a record of a training run; train the pair again or use --text") from error
    return HeldOut(str(python), tuple(str(name) for name in names))
