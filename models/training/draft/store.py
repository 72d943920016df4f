"""Stores a draft's training data on disk: the target's answers, and its likeliest tokens at every position.

Each shard of answers is a file that is complete or absent, so that writing can stop, continue and grow during training.
For every position the log-probabilities (at T = 1) of the 32 likeliest tokens are stored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.training.storage import open_store, replacing
from outrider.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class StoreForm:
    """A store's identity: the target's fingerprint, the prompts' text and seed, and tokens stored per position."""

    target: str
    text: str
    seed: int
    top: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. `tokens` [L] int32, of which `given` are the prompt. `ids`, `log_probs` [N, top]: predictions of the
    token after each of N positions: from the prompt's last on, or all if the text was only read."""

    number: int
    kind: str
    temp: float
    given: int
    tokens: Tensor
    ids: Tensor
    log_probs: Tensor


class Store:
    """The answers in `folder`. Raises InvalidRequest if the folder has another store's."""

    def __init__(self, folder: Path, form: StoreForm) -> None:
        self.form = form
        self._folder, self._seen = folder, set[str]()
        self.answers: list[Answer] = []
        self._sorted: list[Answer] = []
        open_store(folder, asdict(form))
        self.refresh()

    @property
    def following(self) -> int:
        """The number of the next prompt to answer."""
        return 1 + max((answer.number for answer in self.answers), default=-1)

    @property
    def token_count(self) -> int:
        """The number of positions with stored predictions."""
        return sum(len(answer.ids) for answer in self.answers)

    def refresh(self) -> None:
        """Reads new shards."""
        for path in sorted(self._folder.glob("shard-*.safetensors")):
            if path.name not in self._seen:
                self.answers += read_shard(path)
                self._seen.add(path.name)

    def add(self, answers: Sequence[Answer]) -> None:
        """Writes these answers as a new shard. Only one process may add at a time."""
        self.refresh()
        name = f"shard-{len(self._seen):08}.safetensors"
        joined = {
            key: torch.cat([getattr(answer, key) for answer in answers]) for key in ("tokens", "ids", "log_probs")
        }
        about = [(a.number, a.kind, a.temp, a.given, len(a.tokens), len(a.ids)) for a in answers]
        with replacing(self._folder / name) as temporary:
            save_file(joined, temporary, metadata={"answers": json.dumps(about)})
        self.refresh()

    def by_length(self) -> list[Answer]:
        """Returns all answers, shortest first."""
        if len(self._sorted) != len(self.answers):
            self._sorted = sorted(self.answers, key=lambda answer: len(answer.tokens))
        return self._sorted

    def likely(self, count: int, text: Tensor, known: Tensor | None = None) -> Tensor:
        """Returns ids [count], ascending, of the tokens that the target is likeliest to generate: by their probability
        in its answers, their counts in the prompts' `text` [V], and their ids, because a tokenizer learns frequent
        tokens first. With few answers the latter two cover tokens that have not occurred yet. `known`: ids that are
        included in any case."""
        said = torch.zeros(len(text), dtype=torch.float64)
        for answer in self.answers:
            said.index_add_(0, answer.ids.flatten().long(), answer.log_probs.double().exp().flatten())
        learnt = 1 / (torch.arange(len(text), dtype=torch.float64) + 200)
        shares = said / said.sum() + 0.2 * text / text.sum().clamp(min=1) + 0.1 * learnt / learnt.sum()
        if known is not None:
            shares[known] = torch.inf
        return shares.topk(max(count, 0 if known is None else len(known))).indices.sort().values


def read_shard(path: Path) -> list[Answer]:
    """Returns the answers of a shard. Raises InvalidRequest if it is damaged."""
    from safetensors import safe_open

    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["answers"])
        found, at, row = [], 0, 0
        for number, kind, temp, given, length, count in about:
            tokens, rows = tensors["tokens"][at : at + length], slice(row, row + count)
            found.append(Answer(number, kind, temp, given, tokens, tensors["ids"][rows], tensors["log_probs"][rows]))
            at, row = at + length, row + count
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{path} is damaged ({error}); remove it, and its text is written again") from error
    return found
