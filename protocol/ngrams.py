"""N-grams: what followed a text's last tokens earlier, in the same text or in many texts of the same model.

The orchestrator and the target use all of this; nothing of it needs a model or a worker.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.errors import ModelError, first_line
from outrider.protocol.trees import common_prefix_length

MAX_NGRAM_SIZE = 5
MIN_NGRAM_SIZE = 2

# A text is indexed in pieces, each in well under a millisecond. Of a long text the window is indexed, in 15 MiB.
INDEX_PIECE_TOKENS = 256
INDEX_WINDOW_TOKENS = 1 << 15
MAX_COPY_TOKENS = 12

TABLE_NGRAM_SIZE = 3
"""The longest n-gram of a table: up to three tokens add .116 to the rate of plain decoding, longer ones .002 more."""
TABLE_PROBABILITIES = (0.2, 0.35, 0.5, 0.7)
"""A table's entries are counted in classes that begin at these probabilities. Less likely ones are not worth a row."""
EVIDENCE_CLASSES = MAX_NGRAM_SIZE + 1 + len(TABLE_PROBABILITIES)

PRIOR_COPIED, COPY_PRIOR_CHAINS, COPY_FADE = 0.5, 2.0, 0.95
_KEY_FACTOR, _KEY_BITS = 6364136223846793005, 24


@dataclass(frozen=True, slots=True)
class Copy:
    """Tokens that probably follow. `evidence`: how many of the text's last tokens they followed earlier, or, from
    MAX_NGRAM_SIZE + 1 on, how likely a table's entry is. Copies of the same evidence are about equally often right."""

    chain: tuple[int, ...] = ()
    evidence: int = 0


class CopyAcceptance:
    """How often the first token of a copy is right, and each later one if those before it are, by evidence.

    Args:
        prior: the rate before the first copy from a text; `table_prior`: from a table, None: its entries' probability.
        weight: how many copies the prior counts as. `fade`: what is left of a copy's weight after the next one.
    """

    def __init__(
        self,
        prior: float = PRIOR_COPIED,
        weight: float = COPY_PRIOR_CHAINS,
        fade: float = COPY_FADE,
        table_prior: float | None = None,
    ) -> None:
        of_table = TABLE_PROBABILITIES if table_prior is None else [table_prior] * len(TABLE_PROBABILITIES)
        self._priors: list[float] = [*[prior] * (MAX_NGRAM_SIZE + 1), *of_table]
        self._weight, self._fade = weight, fade
        self._tried = [[0.0, 0.0] for _ in range(EVIDENCE_CLASSES)]
        self._right = [[0.0, 0.0] for _ in range(EVIDENCE_CLASSES)]

    def rate(self, evidence: int, position: int) -> float:
        """Returns the probability that the token at a position of such a copy is right if those before it are."""
        index = min(position, 1)
        right = self._right[evidence][index] + self._weight * self._priors[evidence]
        tried = self._tried[evidence][index] + self._weight
        return right / tried

    def add(self, copy: Copy, following: Sequence[int]) -> None:
        """Records a copy, verified or not, and the tokens that followed."""
        right = common_prefix_length(copy.chain, following)
        tried, correct = self._tried[copy.evidence], self._right[copy.evidence]
        for position in range(min(right + 1, len(copy.chain), len(following))):
            index = min(position, 1)
            tried[index] = self._fade * tried[index] + 1.0
            correct[index] = self._fade * correct[index] + float(position < right)

    def best_length(self, copy: Copy, costs: Sequence[float], reached: float = 1.0) -> tuple[int, float]:
        """Returns how many of a copy's first tokens to verify, and the gain: expected tokens minus the rows' costs.

        Args:
            costs: of the first 0, 1, ... tokens, in tokens.
            reached: the probability that all tokens before the copy are accepted.
        """
        length, best, tokens = 0, 0.0, 0.0
        for index in range(min(len(copy.chain), len(costs) - 1)):
            reached *= self.rate(copy.evidence, index)
            tokens += reached
            gain = tokens - costs[index + 1] + costs[0]
            if gain > best:
                length, best = index + 1, gain
        return length, best


class NgramTable:
    """What a model often writes after one to TABLE_NGRAM_SIZE tokens: for each n-gram the likeliest token. A table is a
    file made from the model's own texts (`models/train.py --ngrams`).

    An n-gram is stored as a key of 24 bits, in the file as the gap to the previous key. With 40,000 n-grams, one lookup
    in 140 finds another n-gram with the same key, which costs at most a rejected token.
    """

    def __init__(self, keys: NDArray[np.uint32], tokens: NDArray[np.uint32], shares: NDArray[np.uint8]) -> None:
        """`keys`: of n-grams (`ngram_keys`), ascending. `tokens`: what follows. `shares`: how often, in 255ths."""
        self._keys, self._tokens, self._shares = keys.data, tokens, shares
        self.nbytes = keys.nbytes + tokens.nbytes + shares.nbytes

    @classmethod
    def load(cls, path: str | Path) -> NgramTable:
        """Reads a table.

        Raises:
            ModelError: there is no such file, or it is not a table.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(path)
            gaps, tokens, shares = arrays["gaps"], arrays["tokens"], arrays["shares"]
            is_table = gaps.shape == tokens.shape == shares.shape == (gaps.size,) and shares.dtype == np.uint8
            is_table = is_table and gaps.dtype.kind == tokens.dtype.kind == "u" and bool(gaps[1:].all())
        except (OSError, SafetensorError, LookupError, ValueError) as error:
            raise ModelError(
                f"{path} is not a table of n-grams ({first_line(error)}); expected a file of train.py --ngrams"
            ) from error
        if not is_table:
            raise ModelError(f"{path} is not a table of n-grams; expected a file of train.py --ngrams")
        return cls(np.cumsum(gaps, dtype=np.uint32), tokens.astype(np.uint32), shares)

    @property
    def max_token(self) -> int:
        """The greatest token that it proposes; -1 if it is empty."""
        return int(self._tokens.max(initial=0)) if len(self._tokens) else -1

    def lookup(self, tokens: Sequence[int]) -> tuple[int, float]:
        """Returns what most often follows the longest known n-gram at the end of `tokens`, and how often; -1, 0: no
        n-gram is known."""
        for key in reversed(list(ngram_keys(tokens))):
            place = bisect_left(self._keys, key)
            if place < len(self._keys) and self._keys[place] == key:
                return int(self._tokens[place]), float(self._shares[place]) / 255
        return -1, 0.0

    def copy(self, tokens: Sequence[int], length: int) -> Copy:
        """Returns up to `length` tokens that probably follow `tokens`, as far as all of them are likely enough."""
        chain, reached, evidence = list[int](), 1.0, 0
        while len(chain) < length:
            token, share = self.lookup([*tokens, *chain][-TABLE_NGRAM_SIZE:])
            reached *= share
            if reached < TABLE_PROBABILITIES[0]:
                break
            evidence = evidence or MAX_NGRAM_SIZE + sum(share >= least for least in TABLE_PROBABILITIES)
            chain.append(token)
        return Copy(tuple(chain), evidence)


def ngram_keys(tokens: Sequence[int]) -> Iterator[int]:
    """Yields the keys of the n-grams at the end of `tokens`, of one token, two, up to TABLE_NGRAM_SIZE."""
    key = 0
    for token in islice(reversed(tokens), TABLE_NGRAM_SIZE):
        key = (key * _KEY_FACTOR + token + 1) * _KEY_FACTOR % (1 << 64)
        yield key >> 64 - _KEY_BITS


class NgramIndex:
    """The n-grams of the last `INDEX_WINDOW_TOKENS` of a request's text, with the position after their last occurrence,
    to find copies (prompt lookup).

    Tokens are appended at once and indexed when there is time; until then a lookup does not find them. `table`, if
    given, is used where the text has no copy. A copy ends before the first of `ends`.
    """

    ends: frozenset[int] = frozenset()

    def __init__(self, tokens: Iterable[int] = (), table: NgramTable | None = None) -> None:
        self.table = table
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._indexed = 0
        self.extend(tokens)
        self.index_more(len(self._tokens))

    @property
    def is_empty(self) -> bool:
        """Whether it has no tokens."""
        return not self._tokens

    @property
    def is_behind(self) -> bool:
        """Whether there are tokens to index."""
        return self._indexed < len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens, and indexes them unless earlier ones are still to be indexed."""
        behind = self.is_behind
        self._tokens += tokens
        if not behind:
            self.index_more(INDEX_PIECE_TOKENS)

    def index_more(self, count: int) -> None:
        """Indexes up to `count` more tokens."""
        if not self._indexed:
            self._indexed = max(len(self._tokens) - INDEX_WINDOW_TOKENS, 0)
        for end in range(self._indexed, min(self._indexed + count, len(self._tokens))):
            for gram in self._ngrams_before(end - INDEX_WINDOW_TOKENS):  # those that left the window are dropped
                if self._followed_at.get(gram) == end - INDEX_WINDOW_TOKENS:
                    del self._followed_at[gram]
            for gram in self._ngrams_before(end):
                self._followed_at[gram] = end
            self._indexed = end + 1

    def _ngrams_before(self, end: int) -> Iterator[tuple[int, ...]]:
        """Returns the n-grams before the token at `end`."""
        return (tuple(self._tokens[end - n : end]) for n in range(MIN_NGRAM_SIZE, min(MAX_NGRAM_SIZE, end) + 1))

    def lookup(self, length: int, then: Sequence[int] = ()) -> Copy:
        """Returns `length` tokens that followed the longest known suffix of the text and `then` when it last occurred.

        A copy may continue with its own beginning, because a text that repeats itself continues to repeat. If there is
        none, returns what the table knows, which may be fewer tokens.
        """
        copy = self._find(length, then)
        if self.ends.isdisjoint(copy.chain):
            return copy
        return Copy(tuple(takewhile(lambda token: token not in self.ends, copy.chain)), copy.evidence)

    def _find(self, length: int, then: Sequence[int]) -> Copy:
        """Returns a copy with its end tokens; see `lookup`."""
        tail = [*self._tokens[-MAX_NGRAM_SIZE:], *then][-MAX_NGRAM_SIZE:]
        for n in range(len(tail), MIN_NGRAM_SIZE - 1, -1):
            if (at := self._followed_at.get(tuple(tail[-n:]))) is not None:
                following = [*self._tokens[at : at + length], *then]
                return Copy(tuple(islice(cycle(following), max(length, 0))), n)
        return Copy() if self.table is None or not tail else self.table.copy(tail, length)
