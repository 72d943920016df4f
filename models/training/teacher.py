"""Stores the target's best log-probabilities at every position of the training text.

The teacher's forward costs far more than a draft's step; stored, it is computed once for all epochs. There are two
memory-mapped arrays [windows, length, top]: token ids (uint16) and log-probabilities (float16), 4 bytes per entry.
`done.json` counts the windows written, so that an interrupted run continues.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.training import windows
from models.training.llama import Llama
from models.training.loop import autocast
from models.training.progress import Progress
from models.training.storage import replacing
from outrider.protocol.errors import InvalidRequest

_FORWARD_TOKENS = 8192  # per forward; bounds memory
_FLUSH_EVERY = 16  # forwards


@dataclass(frozen=True, slots=True)
class TeacherRows:
    """Windows with the teacher's predictions: tokens [rows, length], ids and log-probabilities [rows, length, top]."""

    tokens: Tensor
    ids: Tensor
    log_probs: Tensor


class TeacherCache:
    """The teacher's predictions for the first `count` windows of a token stream, in `folder`."""

    def __init__(self, folder: Path, tokens: NDArray[np.uint16], *, count: int, length: int, top: int) -> None:
        """Opens or creates the files. Raises InvalidRequest if the disk has too little space."""
        self._tokens, self.count, self._length = tokens, count, length
        self._done_path = folder / "done.json"
        fresh = not self._done_path.exists()
        folder.mkdir(exist_ok=True)
        shape = (count, length, top)
        if fresh:
            _check_room(folder, 4 * count * length * top)
        self._ids = _array(folder / "ids.npy", np.uint16, shape, fresh)
        self._log_probs = _array(folder / "log_probs.npy", np.float16, shape, fresh)
        if fresh:
            self._mark(0)

    def fill(self, teacher: Llama, device: torch.device) -> None:
        """Writes all missing windows."""
        size = max(1, _FORWARD_TOKENS // self._length)
        progress = Progress("teacher's logits", self.count, "windows")
        teacher.eval()
        for index, first in enumerate(range(int(self._done_path.read_text()), self.count, size), start=1):
            last = min(first + size, self.count)
            self._write(teacher, device, np.arange(first, last))
            if index % _FLUSH_EVERY == 0 or last == self.count:
                self._mark(last)
            progress.update(last)

    def rows(self, indices: NDArray[np.int64], device: torch.device) -> TeacherRows:
        """Returns these windows, with log-probabilities as float32."""
        return TeacherRows(
            torch.from_numpy(self._window_tokens(indices)).to(device),
            torch.from_numpy(self._ids[indices].astype(np.int64)).to(device),
            torch.from_numpy(self._log_probs[indices].astype(np.float32)).to(device),
        )

    @torch.no_grad()
    def _write(self, teacher: Llama, device: torch.device, indices: NDArray[np.int64]) -> None:
        with autocast(device):
            logits = teacher(torch.from_numpy(self._window_tokens(indices)).to(device))
        best = torch.log_softmax(logits.float(), dim=-1).topk(self._ids.shape[-1], dim=-1)
        self._ids[indices] = best.indices.cpu().numpy()
        self._log_probs[indices] = best.values.cpu().numpy()

    def _window_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return windows.rows(self._tokens, indices * self._length, self._length)

    def _mark(self, done: int) -> None:
        self._ids.flush()
        self._log_probs.flush()
        with replacing(self._done_path) as temporary:
            temporary.write_text(str(done))


def _array(path: Path, dtype: type[np.generic], shape: tuple[int, ...], fresh: bool) -> np.memmap:
    if fresh:
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    return np.lib.format.open_memmap(path, mode="r+")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InvalidRequest(
            f"the teacher's logits need {needed / 1e9:.1f} GB, but the disk of {folder} has {free / 1e9:.1f} GB free; "
            "choose another --out or fewer --draft-tokens"
        )
