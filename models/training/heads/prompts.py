"""The prompts of a target's text: passages of source files, each from the beginning of a line.

In every other part the prompts fill their windows, so the target only reads them. The prompts of a part depend only on
the seed and its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from models.training.corpus import Source

_CHARACTERS_PER_TOKEN = 8  # more than most passages have, so that one call of the tokenizer is mostly enough
_SHORTEST, _LONGEST = 1 / 32, 3 / 8  # of a window


@dataclass(frozen=True, slots=True)
class Prompts:
    """Windows [N, length] that begin with prompts of `lengths` [N], to continue at temperatures `temps` [N]."""

    windows: NDArray[np.int64]
    lengths: NDArray[np.int64]
    temps: NDArray[np.float32]


def draw_prompts(
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
    rng = np.random.default_rng((seed, part))
    weights = np.array([len(source.text) for source in sources], dtype=np.float64)
    files = rng.choice(len(sources), size, p=weights / weights.sum())
    lengths = rng.integers(max(1, int(length * _SHORTEST)), max(2, int(length * _LONGEST)), size)
    if part % 2:
        lengths[:] = length
    windows = np.zeros((size, length), np.int64)
    for row, (file, count) in enumerate(zip(files, lengths, strict=True)):
        text = sources[file].text
        start = text.rfind("\n", 0, int(rng.integers(len(text)))) + 1
        windows[row, :count] = _passage(sources, int(file), start, tokenizer, int(count))
    return Prompts(windows, lengths, rng.choice(np.array(temps, np.float32), size))


def _passage(sources: Sequence[Source], file: int, start: int, tokenizer: Tokenizer, count: int) -> list[int]:
    """Returns `count` tokens from character `start` of a file on, continued by the next files."""
    ids: list[int] = []
    while len(ids) < count:
        end = start + (count - len(ids)) * _CHARACTERS_PER_TOKEN
        ids += tokenizer.encode(sources[file].text[start:end]).ids
        file, start = (file + 1) % len(sources), 0
    return ids[:count]
