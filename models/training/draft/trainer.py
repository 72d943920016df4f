"""Distils a draft from a store of answers, for some minutes or until it is stopped; the next run continues.

The learning rate stays at its peak, and a running mean of the weights replaces its decay, so that the run may end and
its text grow at any time; with a number of minutes the rate falls towards their end. The mean that agrees best with
the target on held-out answers is kept.
"""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.training.draft.learner import Batch, Draft, marks
from models.training.draft.store import Answer, Store
from models.training.loop import matrix_dtype
from models.training.storage import replacing

log = logging.getLogger(__name__)

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_CLIP = 1.0
_WARMUP_STEPS = 20
_SHARPNESS = (1.0, 1.1, 1.2, 1.3)  # factors of the finished draft's logits that are tried
_FALL = 0.3  # last share of the minutes, in which the rate falls to 0; in its second half weights are rounded to 4 bits
_MEAN_STEPS = 150  # window of the running mean
_LONGEST = 4  # most time between two evaluations, in `judge_s`
_JUDGING = 8  # least time between two evaluations, in durations of one
_TOP = 12  # tokens in the loss for agreement


@dataclass(frozen=True, slots=True)
class TrainerForm:
    """Settings of a training. `batch_tokens` per step, in answers cut to `length`; `coupled`: the weight of agreement
    at `temp` relative to the KL divergence; `save_s`, `judge_s`: seconds between checkpoints and between
    evaluations."""

    rate: float = 5e-4
    batch_tokens: int = 2048
    length: int = 1024
    coupled: float = 1.0
    temp: float = 0.8
    seed: int = 0
    save_s: float = 60.0
    judge_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Score:
    """Held-out agreement by kind of prompt: `greedy` of answers at T = 0, `coupled` (same noise) of answers at 0.8;
    `accepted`: the mean accepted tokens of greedy chains of 1, 2, ... 8 tokens."""

    greedy: dict[str, float]
    coupled: dict[str, float]
    accepted: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over both temperatures, for all kinds."""
        return (self.greedy["all"] + self.coupled["all"]) / 2


@dataclass(slots=True)
class Progress:
    """The progress of a run. `curve`: (tokens seen, seconds, greedy, coupled) at each evaluation."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    judged: float = 0.0
    best: float = 0.0
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)


class Trainer:
    """Trains `draft` on `store`; keeps its state in `folder`: `draft.pt`, `best.pt`, `curve.json`."""

    def __init__(self, draft: Draft, store: Store, held_out: Sequence[Answer], folder: Path, form: TrainerForm) -> None:
        self._draft, self._store, self._held_out, self._folder, self._form = draft, store, held_out, folder, form
        self._device = draft.words.device
        # On a CPU, time in which the process is suspended, or other processes compute, does not count.
        self._clock = time.process_time if self._device.type == "cpu" else time.monotonic
        self._mean = {name: value.detach().clone() for name, value in draft.named_parameters()}
        self._optimizer = _optimizer(draft)
        self.progress = Progress()
        self._judging_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._restore()

    def run(self, minutes: float | None, grow: Callable[[], None] = lambda: None) -> None:
        """Trains for `minutes`, all runs counted together (None: without end). Calls `grow` before every step."""
        saved, loss = time.monotonic(), 0.0
        while minutes is None or self.progress.seconds < 60 * minutes:
            grow()
            done = 0.0 if minutes is None else self.progress.seconds / (60 * minutes)
            loss = self._step(done)
            if self.progress.seconds - self.progress.judged >= self._judging_period_s():
                self._judge(loss)
            if time.monotonic() - saved >= self._form.save_s:
                self._save()
                saved = time.monotonic()
        self._judge(loss)
        self._save()

    def _step(self, done: float) -> float:
        started = self._clock()
        progress, form = self.progress, self._form
        for group in self._optimizer.param_groups:
            group["lr"] = form.rate * min(1.0, (progress.step + 1) / _WARMUP_STEPS, (1.001 - done) / _FALL)
        batch = self._batch(progress.step)
        stored = done > 1 - _FALL / 2
        self._optimizer.zero_grad(set_to_none=True)
        with self._draft.stored() if stored else nullcontext():
            with self._autocast():
                found = marks(self._draft, batch, temp=form.temp, top=_TOP)
            loss = found.divergence.mean() - form.coupled * found.coupled.mean()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._draft.parameters(), _CLIP)
        self._optimizer.step()
        share = 1 / min(_MEAN_STEPS, 1 + progress.step / 4)
        with torch.no_grad():
            for name, value in self._draft.named_parameters():
                self._mean[name].lerp_(value, share)
        progress.step += 1
        progress.tokens += len(batch.rows)
        value = loss.item()
        progress.seconds += self._clock() - started
        return value

    def _batch(self, step: int) -> Batch:
        """Returns answers of similar length, so that there is little padding. They depend on the step and the store."""
        draws = np.random.default_rng((self._form.seed, step))
        answers = self._store.by_length()
        at = int(draws.integers(len(answers)))
        picked: list[Answer] = []
        longest = 0
        while (
            at < len(answers) and (len(picked) + 1) * max(longest, len(answers[at].tokens)) <= self._form.batch_tokens
        ):
            longest = max(longest, len(answers[at].tokens))
            picked.append(answers[at])
            at += 1 + int(draws.integers(max(1, len(answers) // 500)))
        return Batch.of(picked or [answers[-1 if at >= len(answers) else at]], self._device, self._form.length)

    def _judging_period_s(self) -> float:
        """Returns the time between evaluations: longer if they take long, but limited, because a process that was
        suspended during an evaluation measures too long a duration."""
        least = self._form.judge_s
        return max(least, min(_JUDGING * self._judging_s, _LONGEST * least))

    def _judge(self, loss: float) -> None:
        progress = self.progress
        progress.judged, started = progress.seconds, time.monotonic()
        score = self.score()
        self._judging_s = time.monotonic() - started
        progress.curve.append((progress.tokens, round(progress.seconds), score.greedy["all"], score.coupled["all"]))
        log.info(
            "draft: step %d, %.2fM tokens, %.0f s, loss %.3f, agreement %.3f at T = 0, %.3f at T = %s",
            progress.step, progress.tokens / 1e6, progress.seconds, loss, score.greedy["all"], score.coupled["all"],
            self._form.temp,
        )  # fmt: skip
        if score.mean > progress.best:
            progress.best = score.mean
            with replacing(self._folder / "best.pt") as temporary:
                torch.save({"mean": self._mean, "score": asdict(score), **self._record()}, temporary)
        with replacing(self._folder / "curve.json") as temporary:
            temporary.write_text(json.dumps({"curve": progress.curve, "last": asdict(score)}, indent=1) + "\n")

    def sharpen(self) -> None:
        """Multiplies the best draft's logits by the factor with the most equal choices above temperature 0.

        A draft that is trained for the target's distribution is less sure than the target where it knows less. Under
        the same noise, a surer draft chooses the target's token more often. At T = 0 nothing changes.
        """
        path = self._folder / "best.pt"
        if not path.exists():
            return
        best = torch.load(path, map_location=self._device, weights_only=True)
        lens = best["mean"]["lens"] / best.get("sharpness", 1.0)
        found = {by: self.score(best["mean"] | {"lens": by * lens}) for by in _SHARPNESS}
        sharpness = max(found, key=lambda by: found[by].coupled["all"])
        best["mean"]["lens"] = sharpness * lens
        with replacing(path) as temporary:
            torch.save(best | {"score": asdict(found[sharpness]), "sharpness": sharpness}, temporary)
        log.info("draft: logits times %s, agreement %.3f at T > 0", sharpness, found[sharpness].coupled["all"])

    def score(self, weights: Mapping[str, Tensor] | None = None) -> Score:
        """Returns the score of the mean weights, or of others, rounded as they would be stored."""
        whole = {name: value.detach().clone() for name, value in self._draft.named_parameters()}
        self._draft.load_state_dict(weights or self._mean, strict=False)
        try:
            with self._draft.stored(), self._autocast():
                return score(self._draft, self._held_out, self._form)
        finally:
            self._draft.load_state_dict(whole, strict=False)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=matrix_dtype(self._device) == torch.bfloat16
        )

    def _record(self) -> dict[str, Any]:
        return {"outputs": self._draft.outputs, "form": asdict(self._form), "progress": asdict(self.progress)}

    def _save(self) -> None:
        state = {
            "draft": dict(self._draft.named_parameters()),
            "mean": self._mean,
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(self._folder / "draft.pt") as temporary:
            torch.save({**state, **self._record()}, temporary)

    def _restore(self) -> None:
        path = self._folder / "draft.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self._device, weights_only=True)
        self._draft.load_state_dict(state["draft"], strict=False)
        self._mean = {name: value.detach() for name, value in state["mean"].items()}
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])


@torch.no_grad()
def score(draft: Draft, answers: Sequence[Answer], form: TrainerForm) -> Score:
    """Returns the agreement on these answers."""
    device = draft.words.device
    greedy, warm = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)
    accepted: list[Tensor] = []
    ordered = sorted(answers, key=lambda answer: len(answer.tokens))
    for first in range(0, len(ordered), 8):
        part = ordered[first : first + 8]
        batch = Batch.of(part, device, form.length)
        found = marks(draft, batch, temp=form.temp)
        for number, answer in enumerate(part):
            own = batch.answers == number
            kept, value = (greedy, found.best[own].float()) if answer.temp == 0 else (warm, found.coupled[own])
            kept[answer.kind].append(value)
            kept["all"].append(value)
            if answer.temp == 0:
                accepted.append(_accepted(found.best[own].float()))
    means = ({kind: float(torch.cat(of).mean()) for kind, of in kept.items()} for kept in (greedy, warm))
    lengths = torch.cat(accepted).mean(dim=0).tolist() if accepted else []
    return Score(*means, tuple(lengths))


def _accepted(agrees: Tensor, longest: int = 8) -> Tensor:
    """Returns how many tokens of chains of 1 to `longest` agree, at every position with room for the longest."""
    if len(agrees) < longest:
        return agrees.new_zeros(0, longest)
    return agrees.unfold(0, longest, 1).cumprod(dim=-1).cumsum(dim=-1)


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": _WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=_BETAS, fused=True)
