"""`training.json`, the record beside a pair: how it was made, on what, and which files it has never seen.

`evaluate.py` reads it to find the held-out text. Needs no torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from models.training.recipe import Recipe
from outrider.protocol.errors import InvalidRequest

FILE_NAME = "training.json"


@dataclass(frozen=True, slots=True)
class Trained:
    """One model of the pair: tokens it saw, and its held-out loss at full context, nats a token."""

    tokens_seen: int
    held_out_loss: float


@dataclass(frozen=True, slots=True)
class Record:
    """Everything worth knowing about a finished run."""

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
        """Write `training.json` into the folder of the pair."""
        (pair / FILE_NAME).write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Names, under the standard library of this Python version, of files a pair was not trained on."""

    python: str
    names: tuple[str, ...]


def read_held_out(pair: Path) -> HeldOut | None:
    """The held-out files of a pair, or None when it has no record. Raises InvalidRequest for a damaged one."""
    path = pair / FILE_NAME
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        python, names = content["python"], content["held_out"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is not a record of a training run; make the pair again or name --text") from error
    return HeldOut(str(python), tuple(str(name) for name in names))
