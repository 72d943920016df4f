"""The model does not read prompt tokens that a prompt reader, such as a prefill worker, has read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import pytest

from outrider.engine.flat import LayerKVs
from outrider.engine.kv_rows import DenseKVRows, PromptReader, ReadingFault


class RecordingKVRows(DenseKVRows):
    """Records calls instead of storing keys and values."""

    def __init__(self, reader: PromptReader) -> None:
        self.reader = reader
        self.calls: list[tuple[str, int, int]] = []

    def adopt(self, start: int, layers: LayerKVs) -> int:
        end: int = start + layers[0][0].shape[2]
        self.calls.append(("adopt", start, end))
        return end

    def _prefill_by_model(self, tokens: Sequence[int], start: int) -> int:
        self.calls.append(("read", start, start + len(tokens)))
        return len(tokens)


class Reader:
    """Reads at most `limit` tokens, four at a time, and fails after `good` of these pieces."""

    def __init__(self, limit: int, good: int = 99) -> None:
        self._limit, self._good = limit, good

    def __call__(self, prompt: Sequence[int]) -> Iterator[LayerKVs]:
        tokens = prompt[: self._limit]
        for number, first in enumerate(range(0, len(tokens), 4)):
            if number == self._good:
                raise ReadingFault("gone")
            piece = mx.zeros((1, 1, len(tokens[first : first + 4]), 8))
            yield ((piece, piece),)


@pytest.mark.parametrize(
    ("reader", "calls"),
    [
        (Reader(0), [("read", 0, 10)]),
        (Reader(10), [("adopt", 0, 4), ("adopt", 4, 8), ("adopt", 8, 10)]),
        (Reader(6), [("adopt", 0, 4), ("adopt", 4, 6), ("read", 6, 10)]),
        (Reader(10, good=1), [("adopt", 0, 4), ("read", 4, 10)]),
        (Reader(10, good=0), [("read", 0, 10)]),
    ],
)
def test_model_reads_the_tokens_that_the_reader_left(reader: Reader, calls: list[tuple[str, int, int]]) -> None:
    columns, done = RecordingKVRows(reader), 0
    for _, start, end in calls:
        assert done == start
        done += columns.prefill(list(range(done, 10)), done)
        assert done == end
    assert columns.calls == calls and columns.read == sum(end - start for what, start, end in calls if what == "adopt")
