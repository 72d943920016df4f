"""Models whose next token depends only on the last one, by a table, so that the distribution of their text is known.

`p_values` tests texts against it by chi-square: the tokens that follow each token, and the pairs that follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from scipy.special import chdtrc

from outrider.engine.loading import LoadedModel

Table = np.ndarray[Any, np.dtype[np.float32]]
LEAST_EXPECTED = 5.0


class Markov(nn.Module):
    """A Markov chain: row a of the table [V, V] has the logits after token a. It needs no KV cache and no layers."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self._table = mx.array(table)

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self._table[tokens]


def markov(table: Table) -> LoadedModel:
    return LoadedModel(
        model=Markov(table),
        config={},
        model_type="markov",
        vocab_size=table.shape[1],
        context_length=1 << 20,
        parameters=0,
        weight_bytes=0,
        attention_only=True,
    )


def p_values(texts: Sequence[Sequence[int]], table: Table) -> tuple[float, float]:
    """Returns the p-values of the tokens, and of the pairs of tokens, that follow each token, at temperature 1."""
    p = np.exp(table.astype(np.float64))
    p /= p.sum(axis=1, keepdims=True)
    tokens = range(len(p))
    singles = Counter((a, b) for text in texts for a, b in pairwise(text))
    pairs = Counter((text[i], (text[i + 1], text[i + 2])) for text in texts for i in range(0, len(text) - 2, 2))
    return (
        _p_value(singles, {a: {b: p[a, b] for b in tokens} for a in tokens}),
        _p_value(pairs, {a: {(b, c): p[a, b] * p[b, c] for b in tokens for c in tokens} for a in tokens}),
    )


def _p_value(counted: Counter[tuple[int, Any]], expected: Mapping[int, Mapping[Hashable, float]]) -> float:
    """Returns the p-value over all first tokens. Cells that are expected less than five times are merged."""
    statistic, freedom = 0.0, 0
    for first, shares in expected.items():
        seen = {rest: counted[first, rest] for rest in shares}
        total = sum(seen.values())
        common = [rest for rest, share in shares.items() if share * total >= LEAST_EXPECTED]
        cells = [(float(seen[rest]), shares[rest] * total) for rest in common]
        rare = (total - sum(s for s, _ in cells), total - sum(e for _, e in cells))
        if rare[1] >= 1:
            cells.append(rare)
        statistic += sum((s - e) ** 2 / e for s, e in cells)
        freedom += max(len(cells) - 1, 0)
    return float(chdtrc(freedom, statistic))
