"""Ropes with a position for each token; mlx-lm's own take only one offset for each row.

`patch_ropes` extends every attention's `rope`. The extension acts if a cache's `offset` is a vector with an entry for
each token of a single row. All other calls go to the rope itself, so plain decoding keeps mlx-lm's bits. Knows nothing
of trees or caches.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.engine.hidden_states import add_mixin


class TokenRope:
    """A rope that also takes one offset per token if there is one row. Used by `add_mixin`."""

    def __call__(self, x: mx.array, offset: int | mx.array = 0, **others: Any) -> Any:
        """Applies the rope. `others`: arguments that mlx-lm's ropes don't have; such a call goes to the rope itself."""
        own = super().__call__  # type: ignore[misc]
        per_token = isinstance(offset, mx.array) and x.shape[0] == 1 and offset.shape == (x.shape[-2],)
        if others or not per_token:
            return own(x, offset=offset, **others)
        return own(x.swapaxes(0, 2), offset=offset).swapaxes(0, 2)


def patch_ropes(model: nn.Module) -> None:
    """Extends the rope of every attention of `model`, once."""
    for module in model.modules():
        for name in ("rope", "rotary_emb"):
            rope = module.get(name) if isinstance(module, dict) else None
            if isinstance(rope, nn.Module):
                add_mixin(rope, TokenRope)
