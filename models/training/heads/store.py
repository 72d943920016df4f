"""Stores heads' training data on disk: text that the target wrote, its rows, and its likeliest next tokens.

Each part of windows is a folder that is complete or absent, so that writing can stop, continue and grow, and all heads
of a target share the data. Rows are bfloat16 (numpy holds their bits), as in training.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.training.heads.prompts import Prompts
from models.training.heads.writer import write
from models.training.llama import Llama
from models.training.loop import autocast
from models.training.progress import Progress
from models.training.storage import open_store
from outrider.protocol.errors import InvalidRequest

log = logging.getLogger(__name__)

_FORWARD_TOKENS = 8192  # per forward; bounds memory
_NAMES = ("tokens", "rows", "ids", "log_probs")


@dataclass(frozen=True, slots=True)
class StoreForm:
    """A store's identity. `taps`: the layers with stored rows, concatenated; `top`: likely tokens per position."""

    target: str
    text: str
    seed: int
    length: int
    taps: tuple[int, ...]
    top: int
    temps: tuple[float, ...]
    part: int  # windows

    def part_bytes(self, hidden: int) -> int:
        return self.part * self.length * (4 + 2 * hidden * len(self.taps) + 6 * self.top)


@dataclass(frozen=True, slots=True)
class Lesson:
    """N windows: tokens [N, L], rows [N, L, taps, H], ids and log-probabilities of likely next tokens [N, L, top]."""

    tokens: Tensor
    rows: Tensor
    ids: Tensor
    log_probs: Tensor


class Store:
    """The parts in `folder`. Raises InvalidRequest if the folder has another store's."""

    def __init__(self, folder: Path, form: StoreForm) -> None:
        self._folder, self._form = folder, form
        self._parts: list[dict[str, NDArray[np.generic]]] = []
        open_store(folder, asdict(form))

    @property
    def count(self) -> int:
        """The number of windows that `fill` has opened."""
        return len(self._parts) * self._form.part

    def fill(self, parts: int, model: Llama, prompts: Callable[[int], Prompts]) -> None:
        """Writes the missing ones of `parts` parts, and opens all. `prompts` returns the prompts of a part."""
        missing = [number for number in range(parts) if not self._path(number).exists()]
        self._check_room(len(missing) * self._form.part_bytes(model.shape.hidden))
        progress = Progress("the target's text", parts, "parts")
        for number in range(parts):
            if number in missing:
                self._make(number, model, prompts(number))
            self._parts.append({name: np.load(self._path(number) / f"{name}.npy", mmap_mode="r") for name in _NAMES})
            progress.update(number + 1)

    def lesson(self, indices: NDArray[np.int64], device: torch.device) -> Lesson:
        """Returns these windows."""
        places = [divmod(int(index), self._form.part) for index in indices]
        found = {
            name: torch.from_numpy(np.stack([self._parts[part][name][at] for part, at in places])).to(device)
            for name in _NAMES
        }
        rows = found["rows"].view(torch.bfloat16).unflatten(-1, (len(self._form.taps), -1))
        return Lesson(found["tokens"].long(), rows, found["ids"].long(), found["log_probs"].float())

    def token_counts(self, vocab: int) -> NDArray[np.int64]:
        """Returns how often each token was written [vocab]."""
        return sum(np.bincount(part["tokens"].ravel(), minlength=vocab) for part in self._parts)

    def _path(self, number: int) -> Path:
        return self._folder / f"part-{number:04}"

    def _make(self, number: int, model: Llama, prompts: Prompts) -> None:
        device = next(model.parameters()).device
        generator = torch.Generator(device).manual_seed(self._form.seed * 100_003 + number)
        windows = torch.from_numpy(prompts.windows).to(device)
        temps = torch.from_numpy(prompts.temps).to(device)
        write(model, windows, torch.from_numpy(prompts.given).to(device), temps, generator)
        step = max(1, _FORWARD_TOKENS // self._form.length)
        pieces = [self._seen(model, windows[first : first + step]) for first in range(0, self._form.part, step)]
        temporary = self._folder / "unfinished"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name in _NAMES:
            np.save(temporary / f"{name}.npy", np.concatenate([piece[name] for piece in pieces]))
        os.rename(temporary, self._path(number))

    @torch.no_grad()
    def _seen(self, model: Llama, windows: Tensor) -> dict[str, NDArray[np.generic]]:
        with autocast(windows.device):
            rows = model.rows(windows)
            logits = model.logits(rows[-1])
        best = torch.log_softmax(logits.float(), dim=-1).topk(self._form.top, dim=-1)
        tapped = torch.cat([rows[tap] for tap in self._form.taps], dim=-1)
        return {
            "tokens": windows.int().cpu().numpy(),
            "rows": tapped.bfloat16().view(torch.int16).cpu().numpy(),
            "ids": best.indices.int().cpu().numpy(),
            "log_probs": best.values.half().cpu().numpy(),
        }

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise InvalidRequest(
                f"the target's rows need {needed / 1e9:.1f} GB, but the disk of {self._folder} has {free / 1e9:.1f} GB"
                " free; choose another --store or fewer --text-tokens"
            )
