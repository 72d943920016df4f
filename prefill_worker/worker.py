"""The prefill worker's loop: receives PREFILL, sends PROMPTKV, runs one forward at a time, first come first served.

It handles messages between two forwards. Its reader is the target's own model by MLX or ONNX Runtime, or a Core ML
package of its weights on a Mac's Neural Engine. A package computes in float16, so the text may differ from the one
after the target's own reading if two tokens have nearly equal scores (docs/exactness.md). Knows nothing of rounds or
text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from functools import partial

import mlx.core as mx

from outrider.drafters.coreml.drafter import PackageReader
from outrider.drafters.coreml.selection import load_prompt_reader
from outrider.engine.cache import FlatSequence
from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS, Feed, FlatKVCache, KVLayout
from outrider.engine.kv_rows import ReadingFault
from outrider.engine.load_checks import measure_sequence_cost, open_kv_cache
from outrider.engine.loading import LoadedModel, load, load_lazily
from outrider.engine.prompt_cache import PromptCache
from outrider.protocol.endpoints import MAX_PIECE_BYTES
from outrider.protocol.errors import CannotDraft, OutriderError, wrap_model_errors
from outrider.protocol.messages import Prefill, PromptKv, Shutdown
from outrider.protocol.stats import KvCost
from outrider.protocol.worker_link import Link, WorkerLoop

Pieces = Generator[list[PromptKv]]
"""The keys and values of a prompt, packed by `engine.kv_cache.KVLayout`: a list after each forward."""

log = logging.getLogger(__name__)


class PrefillWorker(WorkerLoop[tuple[Prefill, Pieces]]):
    """Reads prompts from `link` with `reader` until SHUTDOWN; the first one is read, the others wait for their turn."""

    def __init__(self, link: Link, reader: MlxReader | CoreMLReader) -> None:
        super().__init__(link, lambda: reader.prompt_cache.use, reader.prompt_cache.set_limit)
        self._reader = reader

    def turn(self) -> bool:
        """Handles one message, or if there is none runs one forward of the first prompt. Returns False on SHUTDOWN."""
        message = self._link.receive(wait=not self._running)
        match message:
            case None:
                self._continue_reading(*next(iter(self._running.values())))
            case Prefill():
                self._close(message.request)
                self._running[message.request] = message, self._reader.read(message)
            case Shutdown():
                return False
            case _:
                self._handle(message)
        return True

    def _continue_reading(self, task: Prefill, reading: Pieces) -> None:
        try:
            with wrap_model_errors("the prefill worker's forward"):
                pieces = next(reading, None)
        except OutriderError as error:
            self._fail(task, error)
            return
        for piece in pieces or ():
            self._link.send(piece)
        if pieces is None:
            self._close(task.request)

    def _release(self, running: tuple[Prefill, Pieces], discard: bool) -> None:
        running[1].close()


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
        self._layout = KVLayout.of(model.model, model.cpu)
        self.prompt_cache = PromptCache(measure_sequence_cost(kv_cache))

    @classmethod
    def load(cls, model: str, report: Callable[[str], None]) -> MlxReader:
        """Loads the model. Raises ModelError if there is no such model."""
        return cls(load(model, progress=report))

    def read(self, task: Prefill) -> Pieces:
        """Reads all tokens but the last; yields after each forward the pieces that it completes, from `task.start` on.

        If it is closed early or fails, what was read may stay in the prompt cache.
        """
        tokens: list[int] = task.tokens.tolist()
        sequence, sent, total = self._kv_cache.open(), task.start, len(tokens) - 1
        try:
            if (known := self.prompt_cache.find(tokens)) is not None:
                self._kv_cache.adopt(sequence, known)
            while True:
                yield self._pieces(task, sequence, sent)
                sent = max(sent, sequence.length)
                if sequence.length >= total:
                    return
                piece = tokens[sequence.length : min(sequence.length + PREFILL_CHUNK_TOKENS, total)]
                self._kv_cache.forward([Feed(sequence, piece, 0, True)])
                mx.eval(self._kv_cache.state())
                mx.clear_cache()
        finally:
            self.prompt_cache.store(tokens[: sequence.length], partial(self._kv_cache.save, sequence))
            self._kv_cache.close(sequence)

    def _pieces(self, task: Prefill, sequence: FlatSequence, start: int) -> list[PromptKv]:
        """Returns the columns from `start` on, in pieces of at most `MAX_PIECE_BYTES` bytes."""
        pieces, step = [], max(MAX_PIECE_BYTES // max(self._layout.bytes_per_token, 1), 1)
        for first in range(start, sequence.length, step):
            end = min(first + step, sequence.length)
            data = self._layout.pack(self._kv_cache.segment(sequence, first, end))
            pieces.append(PromptKv(task.request, task.epoch, first, end - first, data))
        return pieces


class CoreMLReader:
    """Reads prompts by a Core ML `package`; keys and values are packed in `layout`."""

    number_format = ""

    def __init__(self, package: PackageReader, layout: KVLayout) -> None:
        core_ml, shape = package.package, package.package.layout
        self.vocab_size, self.context_length = shape.architecture.vocab_size, shape.context
        self.parameters, self.weight_bytes = core_ml.manifest.parameters, core_ml.weight_bytes
        self.note = package.note
        self.prompt_cache = PromptCache(KvCost())  # caches nothing
        self._package, self._layout = package, layout

    @classmethod
    def load(cls, model: str, report: Callable[[str], None]) -> CoreMLReader:
        """Loads the package; the first time, converts the model.

        Raises:
            ModelError: the model can't be converted.
            CannotDraft: this machine can't run the package.
        """
        package = load_prompt_reader(model, "coreml", report)
        if isinstance(package, str):
            raise CannotDraft(f"{package}; use --prefill-backend mlx")
        return cls(package, KVLayout.of(load_lazily(model).model))

    def read(self, task: Prefill) -> Pieces:
        """The same as `MlxReader.read`."""
        tokens: list[int] = task.tokens.tolist()
        total, done = len(tokens) - 1, 0
        for read in self._package(tokens[:-1]):
            first, end = max(task.start, done), done + read[0][0].shape[2]
            pieces, skip = [], first - done
            if first < end:
                data = self._layout.pack(tuple((keys[:, :, skip:], values[:, :, skip:]) for keys, values in read))
                pieces.append(PromptKv(task.request, task.epoch, first, end - first, data))
            yield pieces
            done = end
        if done < total:
            raise ReadingFault(
                f"the package reads {done} tokens of a prompt; the target reads the other {total - done}"
            )
