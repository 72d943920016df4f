"""Reads prompts with the target's own model on this process's default device."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import mlx.core as mx

from outrider.engine.flat import FlatText
from outrider.engine.handover import Layout
from outrider.engine.load_checks import open_texts, text_cost
from outrider.engine.loading import LoadedModel, load
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.texts import PREFILL, Feed, FlatTexts
from outrider.prefill_worker.worker import Piece, Size, Tell, parts
from outrider.protocol.errors import CannotDraft, named_errors


class MlxReader:
    """A `Reader` over `model`.

    Raises:
        CannotDraft: what the model remembers can't be handed over.
    """

    note = ""

    def __init__(self, model: LoadedModel) -> None:
        texts = open_texts(model)
        if not isinstance(texts, FlatTexts):
            raise CannotDraft(
                f"prompts of a {model.model_type} model can't be read by a prefill worker: the model has more"
                " state than keys and values, or can't batch requests; leave the prefill worker out"
            )
        sizes = model.vocab_size, model.context_length, model.parameters, model.weight_bytes
        self.size = Size(*sizes, model.number_format)
        self._texts = texts
        self._layout = Layout.of(model.model)
        self.prompt_cache = PromptCache(text_cost(texts))

    @classmethod
    def load(cls, model: str, tell: Tell) -> MlxReader:
        """Raises ModelError: there is no such model."""
        return cls(load(model, progress=tell))

    def read(self, tokens: Sequence[int], start: int) -> Generator[list[Piece]]:
        text, told, total = self._texts.open(), start, len(tokens) - 1
        try:
            known = self.prompt_cache.find(tokens)
            if known is not None:
                self._texts.adopt(text, known)
            while True:
                yield self._pieces(text, told)
                told = max(told, text.length)
                if text.length >= total:
                    return
                with named_errors("the prefill worker's forward"):
                    piece = tokens[text.length : min(text.length + PREFILL, total)]
                    self._texts.forward([Feed(text, piece, 0, True)])
                    mx.eval(self._texts.state())
                    mx.clear_cache()
        finally:
            self._close(text, tokens[: text.length])

    def _pieces(self, text: FlatText, start: int) -> list[Piece]:
        found = []
        for first, end in parts(start, text.length, self._layout.bytes_per_token):
            found.append(Piece(first, end - first, self._layout.pack(self._texts.piece(text, first, end))))
        return found

    def _close(self, text: FlatText, read: Sequence[int]) -> None:
        if self.prompt_cache.wants(read):
            self.prompt_cache.keep(read, self._texts.save(text, len(read)))
        self._texts.close(text)
