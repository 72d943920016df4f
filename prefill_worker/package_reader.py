"""Reads prompts with a Core ML package of the target's weights: on a Mac the Neural Engine's, elsewhere interpreted.

What it computes is rounded to float16, so where two tokens are near each other the text may be another than the one
that follows from the target's own reading (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import mlx.core as mx
import numpy as np

from outrider.drafters.coreml.host import PackageReader
from outrider.drafters.coreml.prompts import reader_for
from outrider.engine.kv_rows import Floats
from outrider.engine.kv_transfer import KVLayout, ReadingFault
from outrider.engine.loading import outline
from outrider.engine.prompt_cache import PromptCache
from outrider.prefill_worker.worker import KVSegment, ReaderInfo, Tell
from outrider.protocol.errors import CannotDraft
from outrider.protocol.stats import KvCost


class CoreMLReader:
    """A `Reader` over `package`, whose pieces are put in this `layout`."""

    def __init__(self, package: PackageReader, layout: KVLayout) -> None:
        made = package.package
        architecture, parameters = made.layout.architecture, made.manifest.parameters
        self.size = ReaderInfo(architecture.vocab_size, made.layout.context, parameters, made.weight_bytes)
        self.note = package.note
        self.prompt_cache = PromptCache(KvCost())  # nothing of a text stays here
        self._package, self._layout = package, layout

    @classmethod
    def load(cls, model: str, tell: Tell) -> CoreMLReader:
        """Converts the model first, once. Raises ModelError: it can't be; CannotDraft: no unit runs the package."""
        package = reader_for(model, "coreml", tell)
        if package is None:
            raise CannotDraft("this machine can't run the target's Core ML package; leave the prefill worker out")
        return cls(package, KVLayout.of(outline(model).model))

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[KVSegment]]:
        total, done = len(tokens) - 1, 0
        taken = self._package.readable(total)
        for read in self._package.read(tokens[:taken]):
            first, end = max(start, done), done + read.count
            if first < end:
                layers = zip(_own(read.keys, first - done), _own(read.values, first - done), strict=True)
                yield [KVSegment(first, end - first, self._layout.pack(tuple(layers)))]
            else:
                yield []
            done = end
        if done < total:
            raise ReadingFault(
                f"the package reads {taken} tokens of a prompt; the target reads the other {total - done}"
            )


def _own(array: Floats, skip: int) -> list[mx.array]:
    """[layers, heads, n, width] as an array [1, heads, n - skip, width] a layer."""
    return [mx.array(np.ascontiguousarray(layer[None, :, skip:])) for layer in array]
