"""The training data of heads on disk: text that the target generated, its hidden states, and its likely next tokens.

The target continues many prompts at once, token by token. The prompts are passages of source files, each from the
beginning of a line. In every other part they fill their windows, so the target only reads them. The prompts of a part
depend only on the seed and its number.

Each part of the text is a folder that is complete or absent, so that generation can stop, continue and grow, and all
heads of a target share the data. Hidden states are bfloat16 (numpy stores their bits), as in training.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from models.training.corpus import Source
from models.training.llama import Llama, decode_attention, sample, top_log_probs
from models.training.loop import autocast
from models.training.progress import Progress
from models.training.storage import check_free_space, file_lock, open_store

_FORWARD_TOKENS = 8192  # per forward; bounds memory
_CHARACTERS_PER_TOKEN = 8  # more than most passages have, so that one call of the tokenizer is mostly enough
_SHORTEST, _LONGEST = 1 / 32, 3 / 8  # of a window
_ARRAYS = ("tokens", "rows", "ids", "log_probs")  # a file each; rows are the hidden states


@dataclass(frozen=True, slots=True)
class Prompts:
    """Windows [N, length] that begin with prompts of `lengths` [N], to continue at temperatures `temps` [N]."""

    windows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    temps: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StoreIdentity:
    """What a store is for. `target`, `text`: digests; `part`: windows in a part; `taps`: the layers whose hidden states
    are stored; `top`: likely tokens per position."""

    target: str
    text: str
    seed: int
    length: int
    taps: tuple[int, ...]
    top: int
    temps: tuple[float, ...]
    part: int

    def part_bytes(self, hidden: int) -> int:
        return self.part * self.length * (4 + 2 * hidden * len(self.taps) + 6 * self.top)


@dataclass(frozen=True, slots=True)
class Batch:
    """N windows: tokens [N, L], hidden states [N, L, taps, H], ids and log-probabilities of likely next tokens
    [N, L, top]."""

    tokens: Tensor
    hidden: Tensor
    ids: Tensor
    log_probs: Tensor


class Store:
    """The parts in `folder`. Raises InvalidRequest if the folder has another store's."""

    def __init__(self, folder: Path, identity: StoreIdentity) -> None:
        self._folder, self._identity = folder, identity
        self._parts: list[dict[str, NDArray[np.generic]]] = []
        open_store(folder, asdict(identity))

    @property
    def count(self) -> int:
        """The number of windows that `fill` has opened."""
        return len(self._parts) * self._identity.part

    def fill(self, parts: int, model: Llama, prompts: Callable[[int], Prompts]) -> None:
        """Generates the missing ones of `parts` parts, and opens all. `prompts` returns the prompts of a part. Another
        run that generates text in this folder is waited for."""
        with file_lock(self._folder / ".writing", wait=True):
            self._fill(parts, model, prompts)

    def _fill(self, parts: int, model: Llama, prompts: Callable[[int], Prompts]) -> None:
        missing = [number for number in range(parts) if not self._path(number).exists()]
        needed = len(missing) * self._identity.part_bytes(model.shape.hidden)
        advice = "choose another --store or fewer --text-tokens"
        check_free_space(self._folder, needed, "the target's hidden states", advice)
        progress = Progress("the target's text", parts, "parts")
        for number in range(parts):
            if number in missing:
                self._write(number, model, prompts(number))
            self._parts.append({name: np.load(self._path(number) / f"{name}.npy", mmap_mode="r") for name in _ARRAYS})
            progress.update(number + 1)

    def batch(self, indices: NDArray[np.int64], device: torch.device) -> Batch:
        """Returns the windows with these indices."""
        places = [divmod(int(index), self._identity.part) for index in indices]
        arrays = {
            name: torch.from_numpy(np.stack([self._parts[part][name][at] for part, at in places])).to(device)
            for name in _ARRAYS
        }
        hidden = arrays["rows"].view(torch.bfloat16).unflatten(-1, (len(self._identity.taps), -1))
        return Batch(arrays["tokens"].long(), hidden, arrays["ids"].long(), arrays["log_probs"].float())

    def token_counts(self, vocab: int) -> NDArray[np.int64]:
        """Returns how often each token occurs [vocab]."""
        return sum(np.bincount(part["tokens"].ravel(), minlength=vocab) for part in self._parts)

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:04}"

    def _write(self, number: int, model: Llama, prompts: Prompts) -> None:
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(self._identity.seed * 100_003 + number)
        windows, prompt_lengths, temps = (
            torch.from_numpy(array).to(device) for array in (prompts.windows, prompts.lengths, prompts.temps)
        )
        generate(model, windows, prompt_lengths, temps, generator)
        step = max(1, _FORWARD_TOKENS // self._identity.length)
        chunks = [self._read(model, windows[first : first + step]) for first in range(0, self._identity.part, step)]
        temporary = self._folder / "unfinished"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", np.concatenate([chunk[name] for chunk in chunks]))
        os.rename(temporary, self._path(number))

    @torch.no_grad()
    def _read(self, model: Llama, windows: Tensor) -> dict[str, NDArray[np.generic]]:
        """Returns the arrays to store for these windows, from one forward."""
        with autocast(windows.device):
            layers = model.hidden_states(windows)
            logits = model.logits(layers[-1])
        ids, log_probs = top_log_probs(logits, self._identity.top)
        tapped = torch.cat([layers[tap] for tap in self._identity.taps], dim=-1)
        return {
            "tokens": windows.int().cpu().numpy(),
            "rows": tapped.bfloat16().view(torch.int16).cpu().numpy(),
            "ids": ids.int().cpu().numpy(),
            "log_probs": log_probs.half().cpu().numpy(),
        }


class _LayerCache:
    """The KV cache of one layer, for windows that are all at the same position."""

    def __init__(self, windows: int, length: int, model: Llama, device: torch.device) -> None:
        shape = (2, windows, model.shape.kv_heads, length, model.shape.head_dim)
        self._keys, self._values = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self._count = 0

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        start, self._count = self._count, self._count + keys.shape[2]
        self._keys[:, :, start : self._count] = keys
        self._values[:, :, start : self._count] = values
        return decode_attention(queries, self._keys[:, :, : self._count], self._values[:, :, : self._count])


@torch.no_grad()
def generate(model: Llama, windows: Tensor, prompt_lengths: Tensor, temps: Tensor, generator: torch.Generator) -> None:
    """Fills the windows [N, L] after their prompts of these lengths [N], each at its temperature of `temps` [N]."""
    count, length = windows.shape
    if int(prompt_lengths.min()) >= length:
        return
    caches = [_LayerCache(count, length, model, windows.device) for _ in range(model.shape.layers)]
    for position in range(length - 1):
        with autocast(windows.device):
            logits = model.logits(model.hidden_states(windows[:, position, None], position, caches)[-1])[:, 0]
        sampled = sample(logits.float(), temps, generator)
        following = windows[:, position + 1]
        windows[:, position + 1] = torch.where(prompt_lengths > position + 1, following, sampled)


def draw_prompts(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    temps: Sequence[float],
    *,
    length: int,
    seed: int,
    part: int,
    size: int,
) -> Prompts:
    """Returns the `size` prompts of part number `part`; files are chosen in proportion to their length."""
    rng = np.random.default_rng((seed, part))
    weights = np.array([len(source.text) for source in sources], dtype=np.float64)
    files = rng.choice(len(sources), size, p=weights / weights.sum())
    lengths = rng.integers(max(1, int(length * _SHORTEST)), max(2, int(length * _LONGEST)), size)
    if part % 2:
        lengths[:] = length
    windows = np.zeros((size, length), np.int64)
    for row, (file, count) in enumerate(zip(files, lengths, strict=True)):
        text = sources[file].text
        start = text.rfind("\n", 0, int(rng.integers(len(text)))) + 1
        windows[row, :count] = _passage(sources, int(file), start, tokenizer, int(count))
    return Prompts(windows, lengths, rng.choice(np.array(temps, np.float32), size))


def _passage(sources: Sequence[Source], file: int, start: int, tokenizer: Tokenizer, count: int) -> list[int]:
    """Returns `count` tokens from character `start` of a file on, continued by the next files."""
    ids: list[int] = []
    while len(ids) < count:
        end = start + (count - len(ids)) * _CHARACTERS_PER_TOKEN
        ids += tokenizer.encode(sources[file].text[start:end]).ids
        file, start = (file + 1) % len(sources), 0
    return ids[:count]
