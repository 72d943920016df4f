"""The readers of a prefill worker: the target's own model by MLX, or a Core ML package of its weights.

A package runs on a Mac's Neural Engine; elsewhere it is interpreted. It computes in float16, so the text may differ
from the one after the target's own reading if two tokens have nearly equal scores (docs/exactness.md).
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
from outrider.prefill_worker.worker import KVSegment, ReaderInfo, Report, parts
from outrider.protocol.errors import CannotDraft, named_errors
from outrider.protocol.stats import KvCost


class MlxReader:
    """A `PrefillReader` by MLX or ONNX Runtime, like the target.

    Raises:
        CannotDraft: the model's state can't be sent.
    """

    note = ""

    def __init__(self, model: LoadedModel) -> None:
        kv_cache = open_kv_cache(model)
        if not isinstance(kv_cache, FlatKVCache):
            raise CannotDraft(
                f"a prefill worker can't read prompts of a {model.model_type} model: the model has more state than"
                " keys and values, or can't batch requests; start the server without prefill workers"
            )
        sizes = model.vocab_size, model.context_length, model.parameters, model.weight_bytes
        self.size = ReaderInfo(*sizes, model.number_format)
        self._kv_cache = kv_cache
        self._layout = KVLayout.of(model.model)
        self.prompt_cache = PromptCache(sequence_cost(kv_cache))

    @classmethod
    def load(cls, model: str, report: Report) -> MlxReader:
        """Loads the model. Raises ModelError if there is no such model."""
        return cls(load(model, progress=report))

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[KVSegment]]:
        sequence, sent, total = self._kv_cache.open(), start, len(tokens) - 1
        try:
            known = self.prompt_cache.find(tokens)
            if known is not None:
                self._kv_cache.adopt(sequence, known)
            while True:
                yield self._pieces(sequence, sent)
                sent = max(sent, sequence.length)
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
        ranges = parts(start, sequence.length, self._layout.bytes_per_token)
        pieces = ((first, end, self._kv_cache.segment(sequence, first, end)) for first, end in ranges)
        return [KVSegment(first, end - first, self._layout.pack(layers)) for first, end, layers in pieces]

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
        self.prompt_cache = PromptCache(KvCost())  # caches nothing
        self._package, self._layout = package, layout

    @classmethod
    def load(cls, model: str, report: Report) -> CoreMLReader:
        """Loads the package; the first time, converts the model.

        Raises:
            ModelError: the model can't be converted.
            CannotDraft: this machine can't run the package.
        """
        package = reader_for(model, "coreml", report)
        if package is None:
            raise CannotDraft("this machine can't run the target's Core ML package; use --prefill-backend mlx")
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
    """Converts [layers, heads, n, width] to one array [1, heads, n - skip, width] for each layer."""
    return [mx.array(np.ascontiguousarray(layer[None, :, skip:])) for layer in array]
