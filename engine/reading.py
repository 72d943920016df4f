"""A prompt read by something else than the model: its keys and values become columns, the model reads what is left.

Whoever reads must be of the same weights; how it reads is its own affair. One that fails costs the time it took, no
more: the model reads on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import mlx.core as mx

from outrider.engine.columns import Columns, Ints, KeysValues, NewColumns
from outrider.engine.prompt_cache import Saved, Start
from outrider.protocol.errors import OutriderError

log = logging.getLogger(__name__)


class ReadingFault(OutriderError):
    """A reader can't go on; the model reads the rest itself."""


class PromptReader(Protocol):
    """Reads prompts in a model's place."""

    def takes(self, count: int) -> int:
        """How many tokens of a prompt of `count` it would read, from the first on; 0: the model is better off alone."""
        ...

    def read(self, tokens: Sequence[int]) -> Iterator[KeysValues]:
        """Reads tokens from position 0 on, a piece at a time. Raises ReadingFault when it can't go on."""
        ...


class OpenColumns(Columns, Protocol):
    """Columns that take keys and values from elsewhere."""

    def adopt(self, start: int, read: KeysValues) -> None:
        """Fills the columns from `start` on."""
        ...


class ReadColumns:
    """`Columns` whose prompts `reader` reads where it is worth it."""

    def __init__(self, columns: OpenColumns, reader: PromptReader) -> None:
        self._columns, self._reader = columns, reader
        self.read = 0  # of the prompt, by the reader

    @property
    def lazy(self) -> bool:
        return self._columns.lazy

    def prefill(
        self, tokens: Sequence[int], progress: Callable[[int, int], None] | None, total: int, start: int = 0
    ) -> None:
        done, wanted = start, self._reader.takes(len(tokens)) if start == 0 else 0
        log.debug("a reader takes %d of %d tokens", wanted, len(tokens))
        try:
            for piece in self._reader.read(tokens[:wanted]) if wanted else ():
                self._columns.adopt(done, piece)
                done += piece.count
                if progress is not None and done < len(tokens):
                    progress(done, total)
        except ReadingFault as error:
            log.warning("%s; the model reads the prompt from token %d on", error, done)
        self.read += done - start
        self._columns.prefill(tokens, progress, total, done)

    @staticmethod
    def forward(texts: Sequence[ReadColumns], new: Sequence[NewColumns]) -> mx.array:
        inner = [text._columns for text in texts]
        return type(inner[0]).forward(inner, new)

    def keep(self, prefix: int, columns: Ints) -> None:
        self._columns.keep(prefix, columns)

    @property
    def whole(self) -> bool:
        return self._columns.whole

    def save(self, count: int) -> Saved:
        return self._columns.save(count)

    def restore(self, start: Start) -> None:
        self._columns.restore(start)
