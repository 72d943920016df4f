"""Features for a head in another process, computed in the target's forward and sent with its outcomes.

A prompt's features are sent piece by piece, while the next piece is read. Knows rows and positions, not drafters.
"""

from __future__ import annotations

import logging

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.head import Head
from outrider.protocol.messages import Features

log = logging.getLogger(__name__)

TOO_LARGE = (
    "the head stops drafting for this text, because its features exceed half precision (65,504), in which they are"
    " sent; use --head-in target for this pair"
)


class FeaturePublisher:
    """Computes the features that `head` reads, in the target's forwards."""

    def __init__(self, head: Head) -> None:
        self.points, self._fuse, self.reach = head.points, head.fuse, head.reach

    def fuse(self, rows: mx.array) -> mx.array:
        """Implements `HiddenStateReader`."""
        return self._fuse(rows).astype(mx.float16)


class FeatureListener:
    """Collects the features of one text's committed tokens; with `reach`, only the newest of each forward."""

    def __init__(self, request: str, epoch: int, reach: int | None = None) -> None:
        self.fault = ""
        self._reach = reach
        self._request, self._epoch = request, epoch
        self._features: list[tuple[int, mx.array]] = []

    def on_features(self, position: int, rows: mx.array) -> None:
        """Adds features; an `engine.kv_cache.Listener`."""
        if self.fault:
            return
        surplus = rows.shape[0] - self._reach if self._reach is not None else 0
        self._features.append((position + surplus, rows[surplus:]) if surplus > 0 else (position, rows))

    def take(self) -> list[Features]:
        """Returns the features since the last call. Waits for those that are not evaluated."""
        features = [(position, np.array(rows)) for position, rows in self._features]
        self._features = []
        if not all(np.isfinite(rows).all() for _, rows in features):
            self.fault = TOO_LARGE
            log.warning("%s", self.fault, extra={"request": self._request})
            return []
        return [Features(self._request, self._epoch, position, rows) for position, rows in features]
