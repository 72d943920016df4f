"""Compares two models on the same text: the loss of each, and how often the target would accept the draft's tokens.

Teacher-forced, in MLX and float32: at every position both read the text itself, not each other's tokens. Acceptance is
that of Leviathan et al. (2023): at temperature 0 the share of equal best tokens, above it the overlap sum(min(p, q)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from models.training.progress import Progress


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over windows and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Losses in nats per token; `agreement` at temperature 0; one of `overlaps` for each other temperature."""

    tokens: int
    target_loss: Figure
    draft_loss: Figure
    agreement: Figure
    overlaps: tuple[Figure, ...]


def windows(documents: Sequence[Sequence[int]], length: int) -> Iterator[list[int]]:
    """Yields windows of `length` tokens and the token that follows, each within one document.

    A document's last window is included if it is more than half full, its only window always.
    """
    for document in documents:
        for start in range(0, len(document) - 1, length):
            window = list(document[start : start + length + 1])
            if len(window) > length // 2 or start == 0:
                yield window


def compare(
    target: Any, draft: Any, documents: Sequence[Sequence[int]], *, length: int, limit: int, temps: Sequence[float]
) -> Comparison:
    """Measures both models on at least `limit` tokens of the documents, or on all."""
    chosen = list(_until(windows(documents, length), limit))
    progress = Progress("comparing", len(chosen), "windows")
    measured = []
    for index, window in enumerate(chosen, start=1):
        measured.append(measure_window(target, draft, window, temps))
        progress.update(index)
    weights = np.array([len(window) - 1 for window in chosen], dtype=np.float64)
    figures = [_figure(column, weights) for column in np.array(measured).T]
    return Comparison(int(weights.sum()), figures[0], figures[1], figures[2], tuple(figures[3:]))


def measure_window(target: Any, draft: Any, window: Sequence[int], temps: Sequence[float]) -> list[float]:
    """Returns means over one window: the target's loss, the draft's loss, agreement, and the overlap by temperature."""
    tokens = mx.array(list(window))[None]
    ours, theirs = target(tokens[:, :-1])[0], draft(tokens[:, :-1])[0]
    shared = min(ours.shape[-1], theirs.shape[-1])  # one vocabulary may have padding rows
    ours, theirs = ours[:, :shared].astype(mx.float32), theirs[:, :shared].astype(mx.float32)
    following = tokens[0, 1:, None]
    columns = [
        -mx.take_along_axis(_log_softmax(ours), following, axis=-1).mean(),
        -mx.take_along_axis(_log_softmax(theirs), following, axis=-1).mean(),
        (ours.argmax(axis=-1) == theirs.argmax(axis=-1)).astype(mx.float32).mean(),
    ]
    for temp in temps:
        p, q = mx.softmax(ours / temp, axis=-1), mx.softmax(theirs / temp, axis=-1)
        columns.append(mx.minimum(p, q).sum(axis=-1).mean())
    mx.eval(columns)
    return [float(column.item()) for column in columns]


def _log_softmax(logits: Any) -> Any:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _until(found: Iterator[list[int]], limit: int) -> Iterator[list[int]]:
    tokens = 0
    for window in found:
        if tokens >= limit:
            return
        tokens += len(window) - 1
        yield window


def _figure(values: NDArray[np.float64], weights: NDArray[np.float64]) -> Figure:
    mean = float(np.average(values, weights=weights))
    if len(values) < 2:
        return Figure(mean, float("nan"))
    shares = weights / weights.sum()
    return Figure(mean, float(np.sqrt(np.sum(shares**2 * (values - mean) ** 2) * len(values) / (len(values) - 1))))
