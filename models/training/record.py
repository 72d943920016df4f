"""`training.json` of a pair: its recipe, training text, and held-out files, which `evaluate.py` reads.

Does not import torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from models.training.recipe import Recipe
from models.training.storage import write_json
from outrider.protocol.errors import InvalidRequest

FILE_NAME = "training.json"


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One model of the pair: the tokens it was trained on, and its held-out loss at full context in nats per token."""

    tokens_seen: int
    held_out_loss: float


@dataclass(frozen=True, slots=True)
class Record:
    """The content of `training.json`."""

    recipe: Recipe
    python: str
    torch: str
    files: int
    characters: int
    tokens: int
    target: ModelRecord
    draft: ModelRecord
    held_out: tuple[str, ...]

    def write(self, pair: Path) -> None:
        """Writes `training.json` into the folder of the pair."""
        write_json(pair / FILE_NAME, asdict(self))


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
        raise InvalidRequest(
            f"{path} is not the record of a training run; train the pair again or use --text"
        ) from error
    return HeldOut(str(python), tuple(str(name) for name in names))
