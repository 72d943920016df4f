"""Distillation of a pair's draft: the teacher's most likely tokens at every position, on disk, and the loss.

A forward of the teacher costs far more than a step of the draft, so it is computed once for all epochs. There are two
memory-mapped arrays [windows, length, top]: token ids (uint16) and log-probabilities (float16), 4 bytes per entry.
`done.json` counts the windows written, so that an interrupted run continues.

The loss is KL(teacher || draft). All tokens but the teacher's most likely ones count as one token, the rest. This is a
lower bound of the full divergence that still penalises a draft that gives the rest more probability than the teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.training import windows
from models.training.llama import Llama, top_log_probs
from models.training.loop import autocast
from models.training.progress import Progress
from models.training.storage import check_free_space
from outrider.protocol.digest import replace_file

_FORWARD_TOKENS = 8192  # per forward; bounds memory
_FLUSH_EVERY = 16  # forwards


@dataclass(frozen=True, slots=True)
class TeacherBatch:
    """Windows and the teacher's predictions: tokens [N, length], ids and log-probabilities [N, length, top]."""

    tokens: Tensor
    ids: Tensor
    log_probs: Tensor


class TeacherCache:
    """The teacher's predictions for the first `count` windows of a token stream, in `folder`."""

    def __init__(self, folder: Path, tokens: NDArray[np.uint16], *, count: int, length: int, top: int) -> None:
        """Opens or creates the files. Raises InvalidRequest if the disk has too little space."""
        self._tokens, self.count, self._length = tokens, count, length
        self._done_path = folder / "done.json"
        is_new = not self._done_path.exists()
        folder.mkdir(exist_ok=True)
        shape = (count, length, top)
        if is_new:
            advice = "choose another --out or fewer --draft-tokens"
            check_free_space(folder, 4 * count * length * top, "the teacher's predictions", advice)
        self._ids = _open_array(folder / "ids.npy", np.uint16, shape, is_new)
        self._log_probs = _open_array(folder / "log_probs.npy", np.float16, shape, is_new)
        if is_new:
            self._set_done(0)

    def fill(self, teacher: Llama, device: torch.device) -> None:
        """Writes all missing windows."""
        size = max(1, _FORWARD_TOKENS // self._length)
        progress = Progress("teacher's predictions", self.count, "windows")
        teacher.eval()
        for index, first in enumerate(range(int(self._done_path.read_text()), self.count, size), start=1):
            last = min(first + size, self.count)
            self._write(teacher, device, np.arange(first, last))
            if index % _FLUSH_EVERY == 0 or last == self.count:
                self._set_done(last)
            progress.update(last)

    def batch(self, indices: NDArray[np.int64], device: torch.device) -> TeacherBatch:
        """Returns the windows with these indices."""
        return TeacherBatch(
            torch.from_numpy(self._window_tokens(indices)).to(device),
            torch.from_numpy(self._ids[indices].astype(np.int64)).to(device),
            torch.from_numpy(self._log_probs[indices].astype(np.float32)).to(device),
        )

    @torch.no_grad()
    def _write(self, teacher: Llama, device: torch.device, indices: NDArray[np.int64]) -> None:
        with autocast(device):
            logits = teacher(torch.from_numpy(self._window_tokens(indices)).to(device))
        ids, log_probs = top_log_probs(logits, self._ids.shape[-1])
        self._ids[indices] = ids.cpu().numpy()
        self._log_probs[indices] = log_probs.cpu().numpy()

    def _window_tokens(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return windows.gather(self._tokens, indices * self._length, self._length)

    def _set_done(self, windows: int) -> None:
        self._ids.flush()
        self._log_probs.flush()
        replace_file(self._done_path, str(windows))


def _open_array(path: Path, dtype: type[np.generic], shape: tuple[int, ...], is_new: bool) -> np.memmap:
    if is_new:
        return np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    return np.lib.format.open_memmap(path, mode="r+")


def kl_to_teacher(logits: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """Returns the mean nats per position. `logits` [..., vocab]; the teacher's `ids` and `log_probs` [..., top]."""
    logits = logits.float()
    total = logits.logsumexp(dim=-1)
    draft_log_probs = logits.gather(-1, ids) - total[..., None]
    draft_rest = logits.scatter(-1, ids, float("-inf")).logsumexp(dim=-1) - total
    probs = log_probs.exp()
    rest = (1 - probs.sum(dim=-1)).clamp(min=0)
    # xlogy is 0 where the teacher's rest is 0, where the log is infinite.
    rest_loss = torch.xlogy(rest, rest) - rest * draft_rest
    return ((probs * (log_probs - draft_log_probs)).sum(dim=-1) + rest_loss).mean()
