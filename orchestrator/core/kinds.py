"""What kind of text a request is about, known before its first round: who drafts best differs among them.

Told by tokens alone: a prompt that says things again goes on so, and is copied from; a grammar leaves little to guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

FREE, REPEATING, HELD = "", "repeating", "held"

# Of the newest tokens, so many at most and at least, this share of the pairs must have been there before.
MOST, LEAST = 512, 24
REPEATED = 0.3


def kind_of(tokens: Sequence[int], held: bool) -> str:
    """`held`: by a grammar."""
    if held:
        return HELD
    pairs = list(pairwise(tokens[-MOST:]))
    if len(pairs) < LEAST:
        return FREE
    return REPEATING if len(pairs) - len(set(pairs)) >= REPEATED * len(pairs) else FREE
