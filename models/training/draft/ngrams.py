"""Makes a table of n-grams (`outrider.protocol.ngrams`) from the text that a target generated for its draft.

The tokens after an n-gram are counted by the target's probabilities, of which the text has the highest at each
position. The estimate of a longer n-gram is smoothed with that of the shorter one, and left out if it is hardly
different. Imports PyTorch only to read that text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from models.training.storage import replacing
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.ngrams import TABLE_NGRAM_SIZE, TABLE_PROBABILITIES, ngram_keys

if TYPE_CHECKING:
    from models.training.draft.store import Sample

Ngram = tuple[int, ...]

_TOKENS_PER_POSITION = 4  # the most likely ones
_MIN_COUNT = 5  # from 2 on, plain decoding would be .010 faster, and the package .3 MB larger
_PRIOR_COUNT = 0.5  # weight of the shorter n-gram's estimate, in occurrences
_MIN_DIFFERENCE = 0.12  # an n-gram with the token of the shorter one is left out if its share differs by less


def write_table(out: Path, store: Path) -> None:
    """Writes the table of all answers in `store`, a folder of stores or one, to the file `out`.

    Raises:
        InvalidRequest: there are no answers, or a shard is damaged.
    """
    from models.training.draft.store import read_shard

    shards = sorted(store.glob("**/answers/shard-*.safetensors"))
    if not shards:
        raise InvalidRequest(f"{store} has no text of a target; generate some with --text-only first")
    counts, positions = _count(sample for shard in shards for sample in read_shard(shard))
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temporary:
        save_table(temporary, _select(counts), {"positions": positions})


def _count(samples: Iterable[Sample]) -> tuple[dict[Ngram, dict[int, float]], int]:
    """Returns, for each n-gram, the sum of probabilities of each token after it, and under -1 how often the n-gram
    occurred; and the number of positions."""
    counts: dict[Ngram, dict[int, float]] = {}
    positions = 0
    for sample in samples:
        tokens = sample.tokens.tolist()
        top_ids = sample.ids[:, :_TOKENS_PER_POSITION].tolist()
        top_probs = sample.log_probs[:, :_TOKENS_PER_POSITION].exp().tolist()
        for position, (ids, probs) in enumerate(zip(top_ids, top_probs, strict=True), sample.first):
            positions += 1
            for size in range(1, min(TABLE_NGRAM_SIZE, position + 1) + 1):
                next_counts = counts.setdefault(tuple(tokens[position + 1 - size : position + 1]), defaultdict(float))
                next_counts[-1] += 1
                for token, prob in zip(ids, probs, strict=True):
                    next_counts[token] += prob
    return counts, positions


def _select(counts: Mapping[Ngram, Mapping[int, float]]) -> dict[Ngram, tuple[int, float]]:
    """Returns the n-grams of the table, with the most likely token after each, and its share."""
    entries: dict[Ngram, tuple[int, float]] = {}
    for ngram in sorted(counts, key=len):
        next_counts = counts[ngram]
        occurrences = next_counts[-1]
        token = max((token for token in next_counts if token >= 0), key=next_counts.__getitem__)
        shorter = next((entries[ngram[start:]] for start in range(1, len(ngram)) if ngram[start:] in entries), None)
        prior = shorter[1] if shorter is not None and shorter[0] == token else 0.0
        share = (next_counts[token] + _PRIOR_COUNT * prior) / (occurrences + _PRIOR_COUNT)
        differs = not prior or abs(prior - share) >= _MIN_DIFFERENCE
        if occurrences >= _MIN_COUNT and share >= TABLE_PROBABILITIES[0] and differs:
            entries[ngram] = token, share
    return entries


def save_table(path: str | Path, entries: dict[tuple[int, ...], tuple[int, float]], about: dict[str, Any]) -> None:
    """Writes a table: for each n-gram the most likely next token and its share. `about`: metadata of the file."""
    by_key = {list(ngram_keys(gram))[-1]: entry for gram, entry in entries.items()}
    ordered = [by_key[key] for key in sorted(by_key)]
    gaps = np.array([key - before for before, key in pairwise([0, *sorted(by_key)])], np.uint32)
    tokens, shares = np.array([token for token, _ in ordered], np.uint32), [share for _, share in ordered]
    rounded = np.clip(np.rint(np.array(shares) * 255), 0, 255).astype(np.uint8)
    arrays = {"gaps": _narrow(gaps), "tokens": _narrow(tokens), "shares": rounded}
    Path(path).write_bytes(save(arrays, {name: str(value) for name, value in about.items()}))


def _narrow(array: NDArray[np.uint32]) -> NDArray[Any]:
    """Returns the array as uint16 if its numbers allow it."""
    return array.astype(np.uint16) if array.max(initial=0) < 1 << 16 else array
