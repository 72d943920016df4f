"""The training loop of pairs and heads: AdamW, a cosine schedule per phase, bfloat16 autocast, checkpoints.

It knows nothing of text and teacher: a function computes the loss of a batch from the numbers of its windows. A step
depends only on the recipe and its number, so an interrupted run gives the same result as an uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.training.progress import Progress
from models.training.recipe import Phase
from models.training.storage import replacing

CHECKPOINT_PERIOD_S = 120.0
_WEIGHT_DECAY = 0.1
_MAX_GRAD_NORM = 1.0
_BETAS = (0.9, 0.95)
_WARMUP_SHARE = 0.03
_FINAL_RATE = 0.1  # as a share of the peak rate


@dataclass(frozen=True, slots=True)
class Draws:
    """The windows of a batch: the random draws `first` to `first + size` in phase number `phase`."""

    phase: int
    length: int
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class Step:
    """The position of the loop: step `number` of `count` in phase number `phase`."""

    phase: int
    number: int
    count: int

    def rate(self, peak: float) -> float:
        """Returns the learning rate: a linear warm-up, then a cosine down to a tenth of the peak."""
        warmup = max(1, round(self.count * _WARMUP_SHARE))
        if self.number < warmup:
            return peak * (self.number + 1) / warmup
        progress = (self.number - warmup) / max(1, self.count - warmup)
        return peak * (_FINAL_RATE + (1 - _FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress)))


def pick_device() -> torch.device:
    """Returns CUDA if available, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def matrix_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 if the device multiplies it faster than float32 (Ampere or later, AVX512-BF16, AMX), else
    float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if fast and torch.backends.mkldnn.is_available() else torch.float32


def autocast(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    """Returns a context in which matrix products are bfloat16, if `dtype` is."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock that measures a training's minutes. On a CPU, time in which the process is suspended, or other
    processes compute, does not count."""
    return time.process_time if device.type == "cpu" else time.monotonic


def adamw(model: nn.Module, weight_decay: float) -> torch.optim.AdamW:
    """Returns an optimizer in which only matrices decay. The training loop sets its learning rate."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=_BETAS, fused=True)


class Loop:
    """Trains `model` through `phases`; continues from a checkpoint if it exists."""

    def __init__(self, name: str, model: nn.Module, phases: tuple[Phase, ...], batch_tokens: int) -> None:
        self._name, self._model, self._phases, self._batch_tokens = name, model, phases, batch_tokens
        self._optimizer = adamw(model, _WEIGHT_DECAY)

    def run(
        self, loss_of: Callable[[Draws], Tensor], checkpoint: Path, *, period_s: float = CHECKPOINT_PERIOD_S
    ) -> None:
        """Runs all remaining steps; saves a checkpoint every `period_s` seconds and at the end of each phase."""
        phase, number = self._restore(checkpoint)
        self._model.train()
        while phase < len(self._phases):
            self._run_phase(phase, number, loss_of, checkpoint, period_s)
            phase, number = phase + 1, 0
            self._save(checkpoint, phase, number)

    def tokens_seen(self) -> int:
        """Returns the tokens of a complete run: those of the phases, rounded down to whole batches."""
        return sum(
            phase.steps(self._batch_tokens) * phase.windows(self._batch_tokens) * phase.length for phase in self._phases
        )

    def _run_phase(
        self, index: int, number: int, loss_of: Callable[[Draws], Tensor], checkpoint: Path, period_s: float
    ) -> None:
        phase = self._phases[index]
        size, count = phase.windows(self._batch_tokens), phase.steps(self._batch_tokens)
        progress = Progress(f"{self._name}, windows of {phase.length}", count, "steps")
        saved = time.monotonic()
        for step in range(number, count):
            loss = self._step(Step(index, step, count), loss_of(Draws(index, phase.length, step * size, size)))
            progress.update(step + 1, f"loss {loss:.3f}")
            if time.monotonic() - saved >= period_s:
                self._save(checkpoint, index, step + 1)
                saved = time.monotonic()

    def _step(self, step: Step, loss: Tensor) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = step.rate(self._phases[step.phase].rate)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), _MAX_GRAD_NORM)
        self._optimizer.step()
        return loss.item()

    def _save(self, checkpoint: Path, phase: int, number: int) -> None:
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "phase": phase,
            "number": number,
        }
        with replacing(checkpoint) as temporary:
            torch.save(state, temporary)

    def _restore(self, checkpoint: Path) -> tuple[int, int]:
        if not checkpoint.exists():
            return 0, 0
        state = torch.load(checkpoint, map_location="cpu", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        return int(state["phase"]), int(state["number"])
