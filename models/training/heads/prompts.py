"""The prompts of the target's text: pieces of source files, each from the beginning of a line.

In every other part the windows are real text to the end, which the target need not write. A piece depends only on the
seed and its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.training.corpus import Source

_CHARACTERS_A_TOKEN = 8  # more than nearly all tokens have; a shorter piece does no harm
_SHORTEST, _LONGEST = 1 / 32, 3 / 8  # of a window


@dataclass(frozen=True, slots=True)
class Prompts:
    """Windows [N, length] of which the first `given` [N] tokens are set, to continue at temperatures `temps` [N]."""

    windows: NDArray[np.int64]
    given: NDArray[np.int64]
    temps: NDArray[np.float32]


def draw(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    temps: Sequence[float],
    *,
    length: int,
    seed: int,
    part: int,
    size: int,
) -> Prompts:
    """Returns the `size` prompts of part number `part`; files are chosen in proportion to their length."""
    draws = np.random.default_rng((seed, part))
    weights = np.array([len(source.text) for source in sources], dtype=np.float64)
    files = draws.choice(len(sources), size, p=weights / weights.sum())
    given = draws.integers(max(1, int(length * _SHORTEST)), max(2, int(length * _LONGEST)), size)
    if part % 2:
        given[:] = length
    windows = np.zeros((size, length), np.int64)
    for row, (file, count) in enumerate(zip(files, given, strict=True)):
        text = sources[file].text
        begin = text.rfind("\n", 0, int(draws.integers(len(text)))) + 1
        windows[row, :count] = _piece(sources, int(file), begin, tokenizer, int(count))
    return Prompts(windows, given, draws.choice(np.array(temps, np.float32), size))


def _piece(sources: Sequence[Source], file: int, begin: int, tokenizer: Tokenizer, count: int) -> list[int]:
    """Returns `count` tokens from a file's character `begin` on, continued by the next files."""
    ids: list[int] = []
    while len(ids) < count:
        end = begin + (count - len(ids)) * _CHARACTERS_A_TOKEN
        ids += tokenizer.encode(sources[file].text[begin:end]).ids
        file, begin = (file + 1) % len(sources), 0
    return ids[:count]
