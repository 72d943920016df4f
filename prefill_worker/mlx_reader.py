"""Reads prompts with the target's own model on this process's default device."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import mlx.core as mx

from outrider.engine.flat import FlatSequence
from outrider.engine.kv_cache import PREFILL, Feed, FlatKVCache
from outrider.engine.kv_transfer import KVLayout
from outrider.engine.load_checks import open_kv_cache, sequence_cost
from outrider.engine.loading import LoadedModel, load
from outrider.engine.prompt_cache import PromptCache
from outrider.prefill_worker.worker import KVSegment, ReaderInfo, Tell, parts
from outrider.protocol.errors import CannotDraft, named_errors


class MlxReader:
    """A `Reader` over `model`.

    Raises:
        CannotDraft: what the model remembers can't be handed over.
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
        self._texts = kv_cache
        self._layout = KVLayout.of(model.model)
        self.prompt_cache = PromptCache(sequence_cost(kv_cache))

    @classmethod
    def load(cls, model: str, tell: Tell) -> MlxReader:
        """Raises ModelError: there is no such model."""
        return cls(load(model, progress=tell))

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[KVSegment]]:
        sequence, told, total = self._texts.open(), start, len(tokens) - 1
        try:
            known = self.prompt_cache.find(tokens)
            if known is not None:
                self._texts.adopt(sequence, known)
            while True:
                yield self._pieces(sequence, told)
                told = max(told, sequence.length)
                if sequence.length >= total:
                    return
                with named_errors("the prefill worker's forward"):
                    piece = tokens[sequence.length : min(sequence.length + PREFILL, total)]
                    self._texts.forward([Feed(sequence, piece, 0, True)])
                    mx.eval(self._texts.state())
                    mx.clear_cache()
        finally:
            self._close(sequence, tokens[: sequence.length])

    def _pieces(self, sequence: FlatSequence, start: int) -> list[KVSegment]:
        found = []
        for first, end in parts(start, sequence.length, self._layout.bytes_per_token):
            found.append(KVSegment(first, end - first, self._layout.pack(self._texts.segment(sequence, first, end))))
        return found

    def _close(self, sequence: FlatSequence, read: Sequence[int]) -> None:
        if self.prompt_cache.wants(read):
            self.prompt_cache.keep(read, self._texts.save(sequence, len(read)))
        self._texts.close(sequence)
