"""What reads prompts in a prefill worker: the target's own model by MLX, or a Core ML package of its weights.

A package runs on a Mac's Neural Engine, elsewhere it is interpreted. It computes in float16, so where two tokens have
nearly equal scores the text may differ from the one after the target's own reading (docs/exactness.md).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import mlx.core as mx
import numpy as np

from outrider.drafters.coreml.host import PackageReader
from outrider.drafters.coreml.prompts import reader_for
from outrider.engine.flat import FlatSequence, Floats
from outrider.engine.kv_cache import PREFILL, Feed, FlatKVCache
from outrider.engine.kv_transfer import KVLayout, ReadingFault
from outrider.engine.load_checks import open_kv_cache, sequence_cost
from outrider.engine.loading import LoadedModel, load, outline
from outrider.engine.prompt_cache import PromptCache
from outrider.prefill_worker.worker import KVSegment, ReaderInfo, Tell, parts
from outrider.protocol.errors import CannotDraft, named_errors
from outrider.protocol.stats import KvCost


class MlxReader:
    """A `PrefillReader` by MLX or ONNX Runtime, as the target itself reads.

    Raises:
        CannotDraft: the model's state can't be handed over.
    """

    note = ""

    def __init__(self, model: LoadedModel) -> None:
        kv_cache = open_kv_cache(model)
        if not isinstance(kv_cache, FlatKVCache):
            raise CannotDraft(
                f"prompts of a {model.model_type} model can't be read by a prefill worker: the model has more"
                " state than keys and values, or can't batch requests; leave the prefill worker out"
            )
        sizes = model.vocab_size, model.context_length, model.parameters, model.weight_bytes
        self.size = ReaderInfo(*sizes, model.number_format)
        self._kv_cache = kv_cache
        self._layout = KVLayout.of(model.model)
        self.prompt_cache = PromptCache(sequence_cost(kv_cache))

    @classmethod
    def load(cls, model: str, tell: Tell) -> MlxReader:
        """Raises ModelError: there is no such model."""
        return cls(load(model, progress=tell))

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[KVSegment]]:
        sequence, told, total = self._kv_cache.open(), start, len(tokens) - 1
        try:
            known = self.prompt_cache.find(tokens)
            if known is not None:
                self._kv_cache.adopt(sequence, known)
            while True:
                yield self._pieces(sequence, told)
                told = max(told, sequence.length)
                if sequence.length >= total:
                    return
                with named_errors("the prefill worker's forward"):
                    piece = tokens[sequence.length : min(sequence.length + PREFILL, total)]
                    self._kv_cache.forward([Feed(sequence, piece, 0, True)])
                    mx.eval(self._kv_cache.state())
                    mx.clear_cache()
        finally:
            self._close(sequence, tokens[: sequence.length])

    def _pieces(self, sequence: FlatSequence, start: int) -> list[KVSegment]:
        found = []
        for first, end in parts(start, sequence.length, self._layout.bytes_per_token):
            found.append(KVSegment(first, end - first, self._layout.pack(self._kv_cache.segment(sequence, first, end))))
        return found

    def _close(self, sequence: FlatSequence, read: Sequence[int]) -> None:
        if self.prompt_cache.wants(read):
            self.prompt_cache.keep(read, self._kv_cache.save(sequence, len(read)))
        self._kv_cache.close(sequence)


class CoreMLReader:
    """A `PrefillReader` over a Core ML `package`; keys and values are packed in `layout`."""

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
