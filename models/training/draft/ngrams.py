"""Makes a table of n-grams (`outrider.protocol.ngrams`) from the texts that a target wrote for its draft.

What follows an n-gram is counted by the target's own probabilities, of which the text has the likeliest at each
position. A longer n-gram begins with what the shorter one knows, and is left out where it knows no better.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from models.training.draft.ngram_table import save_table
from models.training.draft.store import Answer, read_shard
from models.training.storage import replacing
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.ngrams import TABLE_NGRAM_SIZE, TABLE_PROBABILITIES

Ngram = tuple[int, ...]

_TOKENS_PER_POSITION = 4  # of those that the target thought likeliest
_MIN_COUNT = 5  # fewer add less to the rate of plain decoding (.010 from 2 on) than to the size of the package (.3 MB)
_PRIOR_COUNT = 0.5  # how often the shorter n-gram's share counts
_SAME_SHARE = 0.12  # an n-gram that says the same as the shorter one, up to this, is left out


def write(out: Path, store: Path) -> None:
    """Writes the table of all answers in `store`, a folder of stores or one, to the file `out`.

    Raises:
        InvalidRequest: there are no answers, or a shard is damaged.
    """
    shards = sorted(store.glob("**/answers/shard-*.safetensors"))
    if not shards:
        raise InvalidRequest(f"{store} has no text of a target; write some with --text-only first")
    counts, positions = _count(answer for shard in shards for answer in read_shard(shard))
    with replacing(out) as temporary:
        save_table(temporary, _select(counts), {"positions": positions})


def _count(answers: Iterable[Answer]) -> tuple[dict[Ngram, dict[int, float]], int]:
    """Returns by n-gram how often each token followed, by probability (-1: how often the n-gram occurred), and the
    number of positions."""
    counts: dict[Ngram, dict[int, float]] = {}
    positions = 0
    for answer in answers:
        tokens, first = answer.tokens.tolist(), len(answer.tokens) - len(answer.ids)
        ids, shares = answer.ids[:, :_TOKENS_PER_POSITION].tolist(), answer.log_probs[:, :_TOKENS_PER_POSITION].exp()
        for place, (likeliest, odds) in enumerate(zip(ids, shares.tolist(), strict=True), first):
            positions += 1
            for size in range(1, min(TABLE_NGRAM_SIZE, place + 1) + 1):
                following = counts.setdefault(tuple(tokens[place + 1 - size : place + 1]), defaultdict(float))
                following[-1] += 1
                for token, share in zip(likeliest, odds, strict=True):
                    following[token] += share
    return counts, positions


def _select(counts: Mapping[Ngram, Mapping[int, float]]) -> dict[Ngram, tuple[int, float]]:
    """Returns the n-grams that a table keeps, with the likeliest token after each, and its share."""
    entries: dict[Ngram, tuple[int, float]] = {}
    for ngram in sorted(counts, key=len):
        following = counts[ngram]
        occurred = following[-1]
        token = max((token for token in following if token >= 0), key=following.__getitem__)
        shorter = next((entries[ngram[at:]] for at in range(1, len(ngram)) if ngram[at:] in entries), None)
        known = shorter[1] if shorter is not None and shorter[0] == token else 0.0
        share = (following[token] + _PRIOR_COUNT * known) / (occurred + _PRIOR_COUNT)
        says_more = not known or abs(known - share) >= _SAME_SHARE
        if occurred >= _MIN_COUNT and share >= TABLE_PROBABILITIES[0] and says_more:
            entries[ngram] = token, share
    return entries
