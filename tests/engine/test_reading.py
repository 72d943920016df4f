"""Prompts that something else has read are not read by the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import pytest

from outrider.engine.flat import LayerKVs
from outrider.engine.kv_rows import DenseKVRows, PromptReader, ReadingFault


class RecordingKVRows(DenseKVRows):
    """Columns that note what they are told."""

    def __init__(self, reader: PromptReader) -> None:
        self.reader = reader
        self.told: list[tuple[str, int, int]] = []

    def adopt(self, start: int, layers: LayerKVs) -> int:
        end: int = start + layers[0][0].shape[2]
        self.told.append(("adopt", start, end))
        return end

    def _prefill_rest(self, tokens: Sequence[int], start: int, progress: Any, total: int) -> None:
        self.told.append(("read", start, len(tokens)))


class Reader:
    """Takes `readable` tokens, four at a time, and fails after `good` of these pieces."""

    note = "prompts are read by a test"

    def __init__(self, takes: int, good: int = 99) -> None:
        self._takes, self._good = takes, good

    def readable(self, count: int) -> int:
        return min(self._takes, count)

    def read(self, tokens: Sequence[int]) -> Iterator[LayerKVs]:
        for number, first in enumerate(range(0, len(tokens), 4)):
            if number == self._good:
                raise ReadingFault("gone")
            piece = mx.zeros((1, 1, len(tokens[first : first + 4]), 8))
            yield ((piece, piece),)


@pytest.mark.parametrize(
    ("reader", "told"),
    [
        (Reader(0), [("read", 0, 10)]),
        (Reader(10), [("adopt", 0, 4), ("adopt", 4, 8), ("adopt", 8, 10), ("read", 10, 10)]),
        (Reader(6), [("adopt", 0, 4), ("adopt", 4, 6), ("read", 6, 10)]),
        (Reader(10, good=1), [("adopt", 0, 4), ("read", 4, 10)]),
        (Reader(10, good=0), [("read", 0, 10)]),
    ],
)
def test_model_reads_the_tokens_that_the_reader_left(reader: Reader, told: list[tuple[str, int, int]]) -> None:
    columns, seen = RecordingKVRows(reader), list[tuple[int, int]]()
    columns.prefill(list(range(10)), lambda *at: seen.append(at), 11)
    assert columns.told == told and columns.read == told[-1][1]
    assert seen == [(end, 11) for what, _, end in told if what == "adopt" and end < 10]


def test_exception_in_the_progress_callback_ends_the_reading() -> None:
    columns = RecordingKVRows(Reader(10))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        columns.prefill(list(range(10)), stop, 11)
    assert columns.told == [("adopt", 0, 4)]
