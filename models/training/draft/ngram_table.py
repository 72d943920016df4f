"""Writes the file that `outrider.protocol.ngrams.NgramTable` reads. Does not import PyTorch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from outrider.protocol.ngrams import ngram_keys


def save_table(path: str | Path, entries: dict[tuple[int, ...], tuple[int, float]], about: dict[str, Any]) -> None:
    """Writes a table: for each n-gram the most likely next token and its share. `about`: metadata of the file."""
    by_key = {list(ngram_keys(gram))[-1]: entry for gram, entry in entries.items()}
    ordered = [by_key[key] for key in sorted(by_key)]
    gaps = np.array([key - before for before, key in pairwise([0, *sorted(by_key)])], np.uint32)
    tokens, shares = np.array([token for token, _ in ordered], np.uint32), [share for _, share in ordered]
    rounded = np.clip(np.rint(np.array(shares) * 255), 0, 255).astype(np.uint8)
    arrays = {"gaps": _narrow(gaps), "tokens": _narrow(tokens), "shares": rounded}
    save_file(arrays, path, {name: str(value) for name, value in about.items()})


def _narrow(array: NDArray[np.uint32]) -> NDArray[Any]:
    """Returns the array as uint16 if its numbers allow it."""
    return array.astype(np.uint16) if array.max(initial=0) < 1 << 16 else array
