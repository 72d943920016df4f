"""What a grammar allows, laid over logits: a bit a token becomes -inf where it is not set.

Knows bits and logits; what is allowed is `grammar.constraint`'s to say.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from outrider.grammar.constraint import Words


def masked(logits: mx.array, words: Words) -> mx.array:
    """Logits [R, V] with -inf where `words` [R, W] have no bit, or are too short to have one. Lazy."""
    bits = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
    return mx.where(mx.array(bits.view(np.bool_)), logits, mx.array(-mx.inf, logits.dtype))
