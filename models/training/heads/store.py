"""What heads learn from, kept on disk: text that the target wrote, its rows there and what it thought likely next.

In parts of so many windows, each a folder that is whole or absent, so that writing can stop, go on and grow, and all
heads of one target learn from the same. Rows are bfloat16 (numpy holds their bits), as matrices read them in training.
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

_FORWARD_TOKENS = 8192  # a forward's worth; bounds memory
_NAMES = ("tokens", "rows", "ids", "log_probs")


@dataclass(frozen=True, slots=True)
class StoreForm:
    """What makes two stores the same. `taps`: whose rows are kept, side by side; `top`: likely tokens a position."""

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
    """N windows: tokens [N, L], rows [N, L, taps, H], likely next tokens' ids and log-probabilities [N, L, top]."""

    tokens: Tensor
    rows: Tensor
    ids: Tensor
    log_probs: Tensor


class Store:
    """The parts in `folder`. Raises InvalidRequest when it holds those of something else."""

    def __init__(self, folder: Path, form: StoreForm) -> None:
        self._folder, self._form = folder, form
        self._parts: list[dict[str, NDArray[np.generic]]] = []
        open_store(folder, asdict(form))

    @property
    def count(self) -> int:
        """Windows that have been read in by `fill`."""
        return len(self._parts) * self._form.part

    def fill(self, parts: int, model: Llama, prompts: Callable[[int], Prompts]) -> None:
        """Write what is missing of so many parts, and open them. `prompts` gives those of a part."""
        missing = [number for number in range(parts) if not self._path(number).exists()]
        self._check_room(len(missing) * self._form.part_bytes(model.shape.hidden))
        progress = Progress("the target's text", parts, "parts")
        for number in range(parts):
            if number in missing:
                self._make(number, model, prompts(number))
            self._parts.append({name: np.load(self._path(number) / f"{name}.npy", mmap_mode="r") for name in _NAMES})
            progress.update(number + 1)

    def lesson(self, indices: NDArray[np.int64], device: torch.device) -> Lesson:
        """These windows."""
        places = [divmod(int(index), self._form.part) for index in indices]
        found = {
            name: torch.from_numpy(np.stack([self._parts[part][name][at] for part, at in places])).to(device)
            for name in _NAMES
        }
        rows = found["rows"].view(torch.bfloat16).unflatten(-1, (len(self._form.taps), -1))
        return Lesson(found["tokens"].long(), rows, found["ids"].long(), found["log_probs"].float())

    def token_counts(self, vocab: int) -> NDArray[np.int64]:
        """How often each token was written [vocab]."""
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
