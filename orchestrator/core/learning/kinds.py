"""What kind of text a request is about, known before its first round: who drafts best differs among them.

A prompt that says things again goes on so, and is copied from; a grammar leaves little to guess; code and prose, which
the front tells apart, are each drafted best by another. Knows tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

FREE, REPEATING, HELD, CODE = "", "repeating", "held", "code"

# Of the newest tokens, so many at most and at least, this share of the pairs must have been there before.
MOST, LEAST = 512, 24
REPEATED = 0.3


def kind_of(tokens: Sequence[int], held: bool, code: bool = False) -> str:
    """`held`: by a grammar. `code`: it looks like a program."""
    if held:
        return HELD
    other = CODE if code else FREE
    pairs = list(pairwise(tokens[-MOST:]))
    if len(pairs) < LEAST:
        return other
    return REPEATING if len(pairs) - len(set(pairs)) >= REPEATED * len(pairs) else other
