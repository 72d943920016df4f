"""After which of its layers does a target say what it would say in the end? Tried on a text of its own.

Knows agreement and layers; nothing of chains or files.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import mlx.core as mx

from outrider.drafting.heads.early_exit import EarlyExit
from outrider.drafting.heads.pairing import trial_text
from outrider.engine.loading import LoadedModel
from outrider.engine.taps import TapPoints, Taps

_MOST = 8  # tokens of a chain


def agreements(target: LoadedModel, exits: Iterable[EarlyExit]) -> dict[int, float]:
    """How often each agrees with the target, by its number of layers."""
    tried, rows = list(exits), list[mx.array]()
    if not tried:
        return {}
    text = mx.array([trial_text(target)])
    taps = Taps(target.model, TapPoints(tuple(exit.layers - 1 for exit in tried)))
    truth = taps.forward(lambda: target.model(text)[0], [(text.shape[1], rows.append)])
    wanted = mx.argmax(truth, axis=-1)
    found = {}
    for exit, own in zip(tried, mx.split(rows[0], len(tried), axis=-1), strict=True):
        found[exit.layers] = cast(float, (mx.argmax(exit.logits(own), axis=-1) == wanted).mean().item())
    return found


def reproduces(target: LoadedModel, last: EarlyExit) -> bool:
    """Whether the norm and the output layer, called by hand behind all layers, make the model's own logits."""
    rows: list[mx.array] = []
    tokens = mx.arange(8)[None]
    taps = Taps(target.model, TapPoints((last.layers - 1,)))
    truth = taps.forward(lambda: target.model(tokens)[0], [(8, rows.append)]).astype(mx.float32)
    apart = mx.abs(last.logits(rows[0]) - truth).max()
    return bool((apart <= 1e-2 * mx.abs(truth).max()).item())


def speedup(agreement: float, share: float) -> float:
    """Tokens a verify over the time of chain and verify, for the best chain, where a draft step takes `share` of it."""
    depths = range(1, _MOST + 1)
    return max(sum(agreement**k for k in range(depth + 1)) / (1 + depth * share) for depth in depths)
