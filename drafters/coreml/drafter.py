"""Runs packages: their host, the drafter `coreml` with its token trees, and a reader of prompts.

Everything runs on the caller's thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from weakref import finalize

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.layout import PackageFunction
from outrider.drafters.coreml.package import Package
from outrider.drafters.coreml.runtimes import CoreMLRuntime
from outrider.drafters.drafter import Drafter, DrafterFault
from outrider.engine.flat import Bools, Ints, LayerKVs
from outrider.engine.kv_rows import KVRows, NewRows, ReadingFault
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.steps import Step
from outrider.engine.tree import Tree, TreeInput
from outrider.protocol.errors import OutriderError
from outrider.protocol.stats import KvCost

log = logging.getLogger(__name__)

MASK_VALUE = -1e4  # float16 can hold it, and exp() of it is 0
_CACHE_INPUTS = ("k_past", "v_past")

TextCache = dict[str, NDArray[np.float32]]
"""One text's keys and values [layers, kv_heads, slots, head_dim], by the names of the inputs."""


@dataclass(frozen=True, slots=True)
class CallOutput:
    """A call's result: `logits` [R, vocab], empty of a prefill; `keys` and `values` [layers, kv_heads, R, head_dim]."""

    logits: NDArray[np.float32]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]


class PackageHost:
    """Calls the functions of `package` on `runtime` with tokens: embeds, rotates, masks, and owns the caches.

    Each row of a call has its own mask. Each function has one set of input buffers, which is reused.
    """

    def __init__(self, package: Package, runtime: CoreMLRuntime) -> None:
        self.package = package
        self.layout = package.layout
        self._runtime = runtime
        self._buffers: dict[str, dict[str, NDArray[np.float32]]] = {}
        self._spare: list[TextCache] = []
        cos, sin = package.rope
        self._cos = np.concatenate([cos, cos], axis=-1)
        self._sin = np.concatenate([-sin, sin], axis=-1)  # the graph rotates by x cos + swap(x) sin

    def new_cache(self) -> TextCache:
        """Returns a cache. Those of closed texts are reused, because a device may read them after a call."""
        if self._spare:
            return self._spare.pop()
        return {name: np.zeros(self.layout.cache_shape, np.float32) for name in _CACHE_INPUTS}

    def give_back(self, cache: TextCache) -> None:
        self._spare.append(cache)

    def forward(
        self,
        function: PackageFunction,
        tokens: Sequence[int],
        positions: Ints,
        visible: Bools,
        cache: TextCache,
        slots: Ints,
    ) -> CallOutput:
        """Feeds R tokens (at most the function's rows), and writes their keys and values into `slots` of `cache`.

        Args:
            visible: what each token sees, [R, slots + the function's rows]: slots as they were before the call, and
                rows of the call, including its own.

        Raises:
            DrafterFault: logits, keys or values are not finite; then nothing is written.
            RuntimeFault: the device failed.
        """
        buffers, count = self._input_buffers(function), len(tokens)
        buffers["x"][:] = 0
        buffers["x"][0, :, 0, :count] = self.package.embedding[tokens].T
        buffers["cos"][0, 0, :count] = self._cos[positions]
        buffers["sin"][0, 0, :count] = self._sin[positions]
        buffers["mask"][:] = MASK_VALUE
        buffers["mask"][0, 0, :count][visible] = 0
        outputs = self._runtime.call(function.name, buffers | cache)
        keys, values = (outputs[name][:, :, :count] for name in ("k_new", "v_new"))
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise DrafterFault(f"{self._runtime.name} returned keys that are NaN or infinite")
        chunks = range(len(self.layout.architecture.head_chunks) if function.logits else 0)
        parts = [outputs[f"logits_{chunk}"][0, :, 0, :count] for chunk in chunks]
        logits = np.concatenate(parts).T if parts else np.empty((count, 0), np.float32)
        if not np.isfinite(logits).all():
            raise DrafterFault(
                f"{self._runtime.name} returned logits that are NaN or infinite; drafting is off for this request"
            )
        cache["k_past"][:, :, slots], cache["v_past"][:, :, slots] = keys, values
        return CallOutput(logits, keys, values)

    def _input_buffers(self, function: PackageFunction) -> dict[str, NDArray[np.float32]]:
        """Returns the function's buffers; unused rows are masked, and what they return is ignored."""
        if function.name not in self._buffers:
            self._buffers[function.name] = {
                name: np.zeros(shape, np.float32)
                for name, shape in self.layout.inputs(function).items()
                if name not in _CACHE_INPUTS
            }
        return self._buffers[function.name]


class CoreMLKVRows(KVRows):
    """`engine.kv_rows.KVRows` of one text or tree on `host`, which nothing is saved of. Not lazy: a forward returns
    when it is complete.

    A column keeps its slot in the package's cache until it is dropped, so rollback and commits move nothing.
    """

    lazy = False
    has_extra_state = True

    def __init__(self, host: PackageHost) -> None:
        self._host, self._layout = host, host.layout
        self._cache = host.new_cache()
        self._give_back = finalize(self, host.give_back, self._cache)
        self._slots: list[int] = []  # of the columns

    @property
    def length(self) -> int:
        return len(self._slots)

    def prefill(self, tokens: Sequence[int], start: int = 0) -> int:
        del self._slots[start:]
        piece = tokens[: self._layout.prefill.rows]
        if piece:
            self.read(piece, self._layout.function_for(len(piece)))
        return len(piece)

    def read(self, tokens: Sequence[int], function: PackageFunction) -> CallOutput:
        """Feeds the next tokens of a text without branches, at most as many as `function` has rows; see `forward`."""
        first, end = self.length, self.length + len(tokens)
        return self._call(
            function, tokens, np.arange(first, end, dtype=np.int32), np.tri(len(tokens), end, first, dtype=np.bool_)
        )

    @staticmethod
    def forward(texts: Sequence[CoreMLKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`, text after text and in pieces of the largest function's rows.

        Raises:
            DrafterFault: the context or the cache is full, or the logits are not finite.
            RuntimeFault: the device failed.
        """
        logits = [part for text, rows in zip(texts, new, strict=True) for part in text._feed(rows)]
        return mx.array(np.concatenate(logits))

    def _feed(self, new: NewRows) -> Iterator[NDArray[np.float32]]:
        del self._slots[new.start :]  # those of a forward that failed
        tokens, max_rows = np.array(new.tokens).tolist(), self._layout.largest.rows
        for first in range(0, len(tokens), max_rows):
            piece, end = tokens[first : first + max_rows], new.start + min(first + max_rows, len(tokens))
            positions, seen = new.positions[self.length : end], new.seen[first : first + max_rows, :end]
            yield self._call(self._layout.function_for(len(piece)), piece, positions, seen).logits

    def keep(self, prefix: int, columns: Ints) -> None:
        self._slots[prefix:] = [self._slots[column] for column in columns.tolist()]

    def close(self) -> None:
        self._give_back()

    def _call(self, function: PackageFunction, tokens: Sequence[int], positions: Ints, seen: Bools) -> CallOutput:
        """Feeds the next R columns; each row of `seen` [R, length + R] marks the columns that one sees."""
        layout, count = self._layout, len(tokens)
        if max(positions) >= layout.context:
            raise DrafterFault(f"the draft's context of {layout.context} tokens is full; drafting is off from here on")
        free = np.setdiff1d(np.arange(layout.slots), self._slots)[:count]
        if len(free) < count:
            raise DrafterFault(
                f"the draft's cache of {layout.slots} slots has fewer than {count} left; "
                "drafting is off for this request"
            )
        visible = np.zeros((count, layout.slots + function.rows), bool)
        visible[:, self._slots] = seen[:, : self.length]
        visible[:, layout.slots : layout.slots + count] = seen[:, self.length :]
        output = self._host.forward(function, tokens, positions, visible, self._cache, free)
        self._slots += free.tolist()
        return output


class CoreMLTree(Tree):
    """A token tree over a package. Scores are computed on the CPU."""

    def score_rows(self, begun: Sequence[TreeInput], logits: mx.array) -> list[tuple[Step, int]]:
        with mx.stream(mx.cpu):  # on a Mac the GPU is the target's
            rows = super().score_rows(begun, logits)
            rows[0][0].best()
        return rows


class CoreMLDrafter(Drafter):
    """A `Drafter` over `package`, run by `runtime`, which is called on one thread only."""

    backend = "coreml"

    def __init__(self, package: Package, runtime: CoreMLRuntime, note: str = "") -> None:
        self.note = note or f"drafting with {runtime.name}"
        self.vocab_size = package.layout.architecture.vocab_size
        self.context_length = package.layout.context
        self.parameters = package.manifest.parameters
        self.weight_bytes = package.weight_bytes
        cache_bytes = 2 * 4 * math.prod(package.layout.cache_shape)  # in float32, whatever the text's length
        self.prompt_cache = PromptCache(KvCost(per_text=cache_bytes))
        self._host = PackageHost(package, runtime)

    def make_tree(self, sampler: Sampler, draws: Draws | None) -> CoreMLTree:
        return CoreMLTree(CoreMLKVRows(self._host), sampler, self.context_length, draws)


class PackageReader:
    """An `engine.kv_rows.PromptReader` that runs `package`, which must have the model's weights, on `runtime`.

    The package has keys and values in MLX's form, [kv_heads, position, head_dim] after the rotation, so nothing is
    transposed or computed again; only float16 rounding differs from MLX's own reading.

    It reads no tokens beyond the package's context. `prompt_cache` is empty.
    """

    number_format = ""

    def __init__(self, package: Package, runtime: CoreMLRuntime) -> None:
        self.vocab_size, self.context_length = package.layout.architecture.vocab_size, package.layout.context
        self.parameters, self.weight_bytes = package.manifest.parameters, package.weight_bytes
        self.note = f"prompts are read by {runtime.name}"
        self.prompt_cache = PromptCache(KvCost())
        self._host = PackageHost(package, runtime)

    def __call__(self, tokens: Sequence[int], start: int = 0) -> Generator[LayerKVs]:
        """Yields after each call the keys and values of the tokens that it has read, from `start` on."""
        prefill, rows = self._host.layout.prefill, CoreMLKVRows(self._host)
        end = min(len(tokens), self.context_length)
        log.debug("the package reads %d of the prompt's %d tokens", end, len(tokens))
        try:
            for first in range(0, end, prefill.rows):
                fresh = rows.read(tokens[first : min(first + prefill.rows, end)], prefill)
                pairs, skip = zip(fresh.keys[:, None], fresh.values[:, None], strict=True), max(start - first, 0)
                layers = tuple((mx.array(keys[:, :, skip:]), mx.array(values[:, :, skip:])) for keys, values in pairs)
                yield layers if skip < fresh.keys.shape[2] else ()
        except OutriderError as error:
            raise ReadingFault(f"the prompt can't be read by the package: {error}") from error
        finally:
            rows.close()
