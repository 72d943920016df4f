"""The training data of drafts on disk: the target's answers, and its most likely tokens at every position.

Each shard of samples is a file that is complete or absent, so that generation can stop, continue and grow during
training. For every position the log-probabilities (at T = 1) of the 32 most likely tokens are stored.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from models.training.storage import open_store, replacing
from outrider.protocol.errors import InvalidRequest

_METADATA_KEY = "answers"


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What a store is for. `target`, `text`: digests of target and snippets; `seed`: of the prompts;
    `top`: likely tokens per position."""

    target: str
    text: str
    seed: int
    top: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt and the target's answer, or text that the target has only read. `tokens` [L] int32 begin with
    `prompt_length` tokens of the prompt. `ids`, `log_probs` [N, top]: the target's predictions of the token after each
    of N positions: from the last one of the prompt on, or all."""

    number: int
    kind: str
    temp: float
    prompt_length: int
    tokens: Tensor
    ids: Tensor
    log_probs: Tensor

    @property
    def first(self) -> int:
        """The first position with predictions."""
        return len(self.tokens) - len(self.ids)


class Store:
    """The samples in `folder`. Raises InvalidRequest if the folder has another store's."""

    def __init__(self, folder: Path, identity: StoreIdentity) -> None:
        self.identity = identity
        self._folder, self._shards_read = folder, set[str]()
        self.samples: list[Sample] = []
        self.token_count = 0  # positions with stored predictions
        self._sorted: list[Sample] = []
        open_store(folder, asdict(identity))
        self.refresh()

    @property
    def next_number(self) -> int:
        """The number of the next prompt to answer."""
        return 1 + max((sample.number for sample in self.samples), default=-1)

    def refresh(self) -> None:
        """Reads new shards."""
        for path in sorted(self._folder.glob("shard-*.safetensors")):
            if path.name not in self._shards_read:
                shard = read_shard(path)
                self.samples += shard
                self.token_count += sum(len(sample.ids) for sample in shard)
                self._shards_read.add(path.name)

    def add(self, samples: Sequence[Sample]) -> None:
        """Writes these samples as a new shard. Only one process may add at a time."""
        self.refresh()
        last = max(self._shards_read, default="shard-00000000.safetensors")  # shards before it may have been removed
        number = int(last[6:14]) + bool(self._shards_read)
        tensors = {
            key: torch.cat([getattr(sample, key) for sample in samples]) for key in ("tokens", "ids", "log_probs")
        }
        metadata = [(s.number, s.kind, s.temp, s.prompt_length, len(s.tokens), len(s.ids)) for s in samples]
        with replacing(self._folder / f"shard-{number:08}.safetensors") as temporary:
            temporary.write_bytes(save(tensors, {_METADATA_KEY: json.dumps(metadata)}))
        self.refresh()

    def by_length(self) -> list[Sample]:
        """Returns all samples, shortest first."""
        if len(self._sorted) != len(self.samples):
            self._sorted = sorted(self.samples, key=lambda sample: len(sample.tokens))
        return self._sorted

    def likely_tokens(self, count: int, frequencies: Tensor, included: Tensor | None = None) -> Tensor:
        """Returns ids [count], ascending, of the tokens that the target is most likely to generate.

        They are ranked by their probability in the samples, their `frequencies` [V] in the prompts' snippets, and their
        ids, because a tokenizer learns frequent tokens first. With few samples the latter two cover tokens that have
        not occurred yet. `included`: ids that are returned in any case.
        """
        mass = torch.zeros(len(frequencies), dtype=torch.float64)
        for sample in self.samples:
            mass.index_add_(0, sample.ids.flatten().long(), sample.log_probs.double().exp().flatten())
        by_id = 1 / (torch.arange(len(frequencies), dtype=torch.float64) + 200)
        scores = mass / mass.sum() + 0.2 * frequencies / frequencies.sum().clamp(min=1) + 0.1 * by_id / by_id.sum()
        if included is not None:
            scores[included] = torch.inf
        return scores.topk(max(count, 0 if included is None else len(included))).indices.sort().values


def read_shard(path: Path) -> list[Sample]:
    """Returns the samples of a shard. Raises InvalidRequest if it is damaged."""
    try:
        tensors = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = json.loads(file.metadata()[_METADATA_KEY])
        samples, at, row = [], 0, 0
        for number, kind, temp, prompt_length, length, count in metadata:
            tokens, rows = tensors["tokens"][at : at + length], slice(row, row + count)
            samples.append(
                Sample(number, kind, temp, prompt_length, tokens, tensors["ids"][rows], tensors["log_probs"][rows])
            )
            at, row = at + length, row + count
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path} is damaged ({error}); remove it, and other text is generated in its place"
        ) from error
    return samples
