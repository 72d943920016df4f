"""Distils a draft from a store of samples, for some minutes or until it is stopped; the next run continues.

The learning rate is constant, and a moving average of the weights (EMA) replaces its decay, so that the run may end and
its text grow at any time. With a number of minutes the rate also decays towards their end. The average that agrees best
with the target on held-out samples is kept.
"""

from __future__ import annotations

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

from models.training.draft.model import Batch, DraftModel, compare_with_target
from models.training.draft.store import Sample, Store
from models.training.loop import adamw, autocast, clock_of, matrix_dtype
from models.training.storage import replacing, write_json

log = logging.getLogger(__name__)

_WEIGHT_DECAY = 0.01
_MAX_GRAD_NORM = 1.0
_WARMUP_STEPS = 20
_DECAY_SHARE = 0.3  # last share of the minutes, in which the rate decays to 0; weights are rounded in its second half
_EMA_STEPS = 150  # window of the moving average
_EVALUATION_SPACING = 8  # least time between two evaluations, in durations of one
_COUPLED_TOP = 12  # tokens per position in the loss for coupled agreement
_LOGIT_SCALES = (1.0, 1.1, 1.2, 1.3)  # factors of the finished draft's logits that are tried
_EVALUATION_BATCH = 8  # samples
_MAX_CHAIN = 8


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Settings of the training. `batch_tokens`: per step, of samples cut to `length`; `coupled`: the weight in the loss
    of coupled agreement at `temp`, relative to the cross entropy; `save_s`, `judge_s`: seconds between two checkpoints
    and between two evaluations."""

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
    """Held-out agreement by kind of prompt, and for `all`: `greedy` on samples at T = 0, `coupled` (same noise) on
    samples at T = 0.8. `accepted`: the mean accepted tokens of greedy chains of 1, 2, ... 8 tokens."""

    greedy: dict[str, float]
    coupled: dict[str, float]
    accepted: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean over both temperatures, for all kinds."""
        return (self.greedy["all"] + self.coupled["all"]) / 2


@dataclass(slots=True)
class TrainerState:
    """The progress of a run. `tokens`: positions in the loss so far; `judged`: the `seconds` of the last evaluation;
    `best`: the best mean score; `curve`: (tokens, seconds, greedy, coupled) at each evaluation."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    judged: float = 0.0
    best: float = 0.0
    curve: list[tuple[int, float, float, float]] = field(default_factory=list)


class Trainer:
    """Trains `draft` on the samples in `store`. Keeps in `folder`: the last checkpoint (`draft.pt`), the best draft
    (`best.pt`) and all scores (`curve.json`)."""

    def __init__(
        self, draft: DraftModel, store: Store, held_out: Sequence[Sample], folder: Path, config: TrainerConfig
    ) -> None:
        self._draft, self._store, self._held_out, self._folder, self._config = draft, store, held_out, folder, config
        self._device = draft.output_weight.device
        self._matrix_dtype = matrix_dtype(self._device)
        self._clock = clock_of(self._device)
        self._ema = {name: value.detach().clone() for name, value in draft.named_parameters()}
        self._optimizer = adamw(draft, _WEIGHT_DECAY)
        self.state = TrainerState()
        self._evaluation_s = 0.0
        folder.mkdir(parents=True, exist_ok=True)
        self._restore()

    def run(self, minutes: float | None, before_step: Callable[[], None] = lambda: None) -> None:
        """Trains for `minutes`, all runs counted together (None: without end)."""
        saved, loss = time.monotonic(), 0.0
        while minutes is None or self.state.seconds < 60 * minutes:
            started = self._clock()
            before_step()
            loss = self._step(0.0 if minutes is None else self.state.seconds / (60 * minutes))
            if self.state.seconds - self.state.judged >= self._evaluation_period_s():
                self._evaluate(loss)
            if time.monotonic() - saved >= self._config.save_s:
                self._save()
                saved = time.monotonic()
            self.state.seconds += self._clock() - started
        self._evaluate(loss)
        self._save()

    def _step(self, progress: float) -> float:
        """Takes a step at this share of the minutes. Returns the loss."""
        state, config = self.state, self._config
        for group in self._optimizer.param_groups:
            group["lr"] = config.rate * min(1.0, (state.step + 1) / _WARMUP_STEPS, (1.001 - progress) / _DECAY_SHARE)
        batch = self._batch(state.step)
        self._optimizer.zero_grad(set_to_none=True)
        with self._draft.fake_quantised() if progress > 1 - _DECAY_SHARE / 2 else nullcontext():
            with autocast(self._device, self._matrix_dtype):
                agreement = compare_with_target(self._draft, batch, temp=config.temp, top=_COUPLED_TOP)
            loss = agreement.cross_entropy.mean() - config.coupled * agreement.coupled.mean()
            loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._draft.parameters(), _MAX_GRAD_NORM)
        self._optimizer.step()
        weight = 1 / min(_EMA_STEPS, 1 + state.step / 4)
        with torch.no_grad():
            for name, value in self._draft.named_parameters():
                self._ema[name].lerp_(value, weight)
        state.step += 1
        state.tokens += len(batch.positions)
        return loss.item()

    def _batch(self, step: int) -> Batch:
        """Returns samples of similar length, to have little padding. They depend on the step and the store."""
        rng = np.random.default_rng((self._config.seed, step))
        samples = self._store.by_length()
        at = int(rng.integers(len(samples)))
        picked = [samples[at]]
        longest = len(samples[at].tokens)
        while True:
            at += 1 + int(rng.integers(max(1, len(samples) // 500)))
            if at >= len(samples):
                break
            longest = max(longest, len(samples[at].tokens))
            if (len(picked) + 1) * longest > self._config.batch_tokens:
                break
            picked.append(samples[at])
        return Batch.of(picked, self._device, self._config.length)

    def _evaluation_period_s(self) -> float:
        """Returns the time between evaluations: longer if they take long."""
        return max(self._config.judge_s, _EVALUATION_SPACING * self._evaluation_s)

    def _evaluate(self, loss: float) -> None:
        state = self.state
        state.judged, started = state.seconds, self._clock()
        score = self.score()
        self._evaluation_s = self._clock() - started
        state.curve.append((state.tokens, round(state.seconds), score.greedy["all"], score.coupled["all"]))
        log.info(
            "draft: step %d, %.2fM tokens, %.0f s, loss %.3f, agreement %.3f at T = 0, %.3f at T = %s",
            state.step, state.tokens / 1e6, state.seconds, loss, score.greedy["all"], score.coupled["all"],
            self._config.temp,
        )  # fmt: skip
        if score.mean > state.best:
            state.best = score.mean
            with replacing(self._folder / "best.pt") as temporary:
                torch.save({"mean": self._ema, "score": asdict(score), **self._metadata()}, temporary)
        with replacing(self._folder / "curve.json") as temporary:
            write_json(temporary, {"curve": state.curve, "last": asdict(score)})

    def scale_logits(self) -> None:
        """Multiplies the best draft's logits by the factor that gives the highest coupled agreement.

        A draft that is trained for the target's distribution is less certain than the target where it knows less. With
        the same noise, a more certain draft samples the target's token more often. At T = 0 nothing changes.
        """
        path = self._folder / "best.pt"
        if not path.exists():
            return
        best = torch.load(path, map_location=self._device, weights_only=True)
        lens = best["mean"]["lens"] / best.get("sharpness", 1.0)
        scores = {scale: self.score(best["mean"] | {"lens": scale * lens}) for scale in _LOGIT_SCALES}
        scale = max(scores, key=lambda scale: scores[scale].coupled["all"])
        best["mean"]["lens"] = scale * lens
        with replacing(path) as temporary:
            torch.save(best | {"score": asdict(scores[scale]), "sharpness": scale}, temporary)
        log.info("draft: logits times %s, agreement %.3f at T > 0", scale, scores[scale].coupled["all"])

    def score(self, weights: Mapping[str, Tensor] | None = None) -> Score:
        """Returns the score of these weights (None: the moving average), rounded as they would be stored."""
        current = {name: value.detach().clone() for name, value in self._draft.named_parameters()}
        self._draft.load_state_dict(weights or self._ema, strict=False)
        try:
            with self._draft.fake_quantised(), autocast(self._device, self._matrix_dtype):
                return score(self._draft, self._held_out, self._config)
        finally:
            self._draft.load_state_dict(current, strict=False)

    def _metadata(self) -> dict[str, Any]:
        return {"outputs": self._draft.vocab_ids, "form": asdict(self._config), "progress": asdict(self.state)}

    def _save(self) -> None:
        checkpoint = {
            "draft": dict(self._draft.named_parameters()),
            "mean": self._ema,
            "optimizer": self._optimizer.state_dict(),
            **self._metadata(),
        }
        with replacing(self._folder / "draft.pt") as temporary:
            torch.save(checkpoint, temporary)

    def _restore(self) -> None:
        path, best = self._folder / "draft.pt", self._folder / "best.pt"
        if not path.exists():
            return
        checkpoint = torch.load(path, map_location=self._device, weights_only=True)
        self._draft.load_state_dict(checkpoint["draft"], strict=False)
        self._ema = {name: value.detach() for name, value in checkpoint["mean"].items()}
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        self.state = TrainerState(**checkpoint["progress"])
        if best.exists():  # it may be newer than the checkpoint
            progress = torch.load(best, map_location="cpu", weights_only=True)["progress"]
            self.state.best = max(self.state.best, progress["best"])


@torch.no_grad()
def score(draft: DraftModel, samples: Sequence[Sample], config: TrainerConfig) -> Score:
    """Returns the agreement on these samples."""
    greedy, coupled = defaultdict[str, list[Tensor]](list), defaultdict[str, list[Tensor]](list)
    accepted: list[Tensor] = []
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    for first in range(0, len(ordered), _EVALUATION_BATCH):
        part = ordered[first : first + _EVALUATION_BATCH]
        batch = Batch.of(part, draft.output_weight.device, config.length)
        agreement = compare_with_target(draft, batch, temp=config.temp)
        for number, sample in enumerate(part):
            own = batch.sample == number
            if sample.temp == 0:
                values, by_kind = agreement.greedy[own].float(), greedy
                accepted.append(_accepted(values))
            else:
                values, by_kind = agreement.coupled[own], coupled
            by_kind[sample.kind].append(values)
            by_kind["all"].append(values)
    means = ({kind: float(torch.cat(v).mean()) for kind, v in by_kind.items()} for by_kind in (greedy, coupled))
    lengths = torch.cat(accepted).mean(dim=0).tolist() if accepted else []
    return Score(*means, tuple(lengths))


def _accepted(equal: Tensor) -> Tensor:
    """Returns [N, 8]: how many tokens of chains of 1 to 8 tokens are accepted, at each position with room for all."""
    if len(equal) < _MAX_CHAIN:
        return equal.new_zeros(0, _MAX_CHAIN)
    return equal.unfold(0, _MAX_CHAIN, 1).cumprod(dim=-1).cumsum(dim=-1)
