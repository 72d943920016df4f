"""The prefill worker's loop: receives PREFILL, sends PROMPTKV, runs one forward at a time, first come first served.

It handles messages between two forwards. Its reader is the target's own model by MLX or ONNX Runtime, or a Core ML
package of its weights on a Mac's Neural Engine. A package computes in float16, so the text may differ from the one
after the target's own reading if two tokens have nearly equal scores (docs/exactness.md). Knows nothing of rounds or
text.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from outrider.drafters.coreml.drafter import PackageReader
from outrider.engine.flat import LayerKVs
from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS, Feed, FlatKVCache, KVLayout
from outrider.engine.kv_rows import ReadingFault
from outrider.engine.load_checks import measure_sequence_cost, open_kv_cache
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import PromptCache
from outrider.protocol.endpoints import MAX_PIECE_BYTES
from outrider.protocol.errors import CannotDraft, OutriderError, wrap_model_errors
from outrider.protocol.messages import Prefill, PromptKv, Shutdown
from outrider.protocol.worker_link import Link, WorkerLoop

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Reading:
    """A prompt that is read. `layers`: its keys and values, a piece after each forward; `sent`: the tokens whose keys
    and values the target has."""

    task: Prefill
    layers: Generator[LayerKVs]
    sent: int


class PrefillWorker(WorkerLoop[Reading]):
    """Reads prompts from `link` with `reader` until SHUTDOWN; the first one is read, the others wait for their turn.
    Keys and values are packed in `layout`."""

    def __init__(self, link: Link, reader: MlxReader | PackageReader, layout: KVLayout) -> None:
        super().__init__(link, lambda: reader.prompt_cache.use, reader.prompt_cache.set_limit)
        self._reader, self._layout = reader, layout

    def turn(self) -> bool:
        """Handles one message, or if there is none runs one forward of the first prompt. Returns False on SHUTDOWN."""
        message = self._link.receive(wait=not self._running)
        match message:
            case None:
                self._continue_reading(next(iter(self._running.values())))
            case Prefill():
                self._close(message.request)
                layers = self._reader(message.tokens[:-1].tolist(), message.start)
                self._running[message.request] = Reading(message, layers, message.start)
            case Shutdown():
                return False
            case _:
                self._handle(message)
        return True

    def _continue_reading(self, reading: Reading) -> None:
        task = reading.task
        try:
            with wrap_model_errors("the prefill worker's forward"):
                layers = next(reading.layers, None)
                for piece in self._pack(reading, layers or ()):
                    self._link.send(piece)
                if layers is None and (left := len(task.tokens) - 1 - reading.sent) > 0:
                    raise ReadingFault(
                        f"the package reads {self._reader.context_length} tokens of a prompt; the target reads the"
                        f" other {left}"
                    )
        except OutriderError as error:
            self._fail(task, error)
            return
        if layers is None:
            self._close(task.request)

    def _pack(self, reading: Reading, layers: LayerKVs) -> Iterator[PromptKv]:
        """Yields keys and values, which follow those sent, in pieces of at most `MAX_PIECE_BYTES` bytes."""
        most, total = max(MAX_PIECE_BYTES // self._layout.bytes_per_token, 1), layers[0][0].shape[2] if layers else 0
        for first in range(0, total, most):
            own = slice(first, min(first + most, total))
            data = self._layout.pack(tuple((keys[:, :, own], values[:, :, own]) for keys, values in layers))
            yield PromptKv(reading.task.request, reading.task.epoch, reading.sent, own.stop - first, data)
            reading.sent += own.stop - first

    def _release(self, running: Reading, discard: bool) -> None:
        running.layers.close()


class MlxReader:
    """Reads prompts by MLX or ONNX Runtime, like the target. `note`: a note for the user on how it reads.

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
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.parameters, self.weight_bytes = model.parameters, model.weight_bytes
        self.number_format = model.number_format
        self._kv_cache = kv_cache
        self.prompt_cache = PromptCache(measure_sequence_cost(kv_cache))

    def __call__(self, tokens: list[int], start: int) -> Generator[LayerKVs]:
        """Yields after each forward the keys and values of the tokens that it has read, from `start` on.

        If it is closed early or fails, what was read may stay in the prompt cache.
        """
        sequence = self._kv_cache.open()
        try:
            if (known := self.prompt_cache.find([*tokens, 0])) is not None:  # which does not look for the last token
                self._kv_cache.adopt(sequence, known)
            while True:
                yield self._kv_cache.segment(sequence, start, sequence.length) if start < sequence.length else ()
                start = max(start, sequence.length)
                if sequence.length >= len(tokens):
                    return
                piece = tokens[sequence.length : sequence.length + PREFILL_CHUNK_TOKENS]
                self._kv_cache.forward([Feed(sequence, piece, 0, True)])
                mx.eval(self._kv_cache.state())
                mx.clear_cache()
        finally:
            self.prompt_cache.store(tokens[: sequence.length], partial(self._kv_cache.save, sequence))
            self._kv_cache.close(sequence)
