"""Runs packages: their host, the drafter `coreml` with its token trees, and a reader of prompts.

Everything runs on the caller's thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.layout import Mode, PackageFunction
from outrider.drafters.coreml.package import Package
from outrider.drafters.coreml.runtimes import CoreMLRuntime, Outputs, RuntimeState
from outrider.drafters.drafter import Drafter, DrafterFault
from outrider.engine.flat import Bools, Ints, LayerKVs, ancestor_mask
from outrider.engine.kv_rows import KVRows, NewRows, ReadingFault
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.steps import Step
from outrider.engine.tree import Tree, TreeInput
from outrider.protocol.errors import OutriderError
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import ROOT

log = logging.getLogger(__name__)

MASK_VALUE = -1e4  # float16 can hold it, and exp() of it is 0
_CACHE_INPUTS = ("k_past", "v_past")


@dataclass(frozen=True, slots=True)
class PackageCache:
    """One text's keys and values: a `state` of the runtime, or inputs [layers, kv_heads, slots, head_dim] by name."""

    arrays: dict[str, NDArray[np.float32]]
    state: RuntimeState | None


@dataclass(slots=True, eq=False)
class _Column:
    """A fed token, which follows that of `parent`. `slot` -1: it is not in the cache."""

    token: int
    position: int
    parent: _Column | None
    slot: int = -1


@dataclass(frozen=True, slots=True)
class CallOutput:
    """A call's result: `logits` [R, vocab]; `keys` and `values` [layers, kv_heads, R, head_dim].

    Arrays that the function does not return are empty.
    """

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
        self._buffers: dict[str, dict[str, NDArray[Any]]] = {}
        self._spare: list[PackageCache] = []
        cos, sin = package.rope
        self._cos = np.concatenate([cos, cos], axis=-1)
        self._sin = np.concatenate([-sin, sin], axis=-1)  # the graph rotates by x cos + swap(x) sin

    def new_cache(self) -> PackageCache:
        """Returns an empty cache. Buffers of closed ones are reused, because a device may read them after a call."""
        if self._spare:
            return self._spare.pop()
        names = () if self.layout.mode.stateful else _CACHE_INPUTS
        arrays = {name: np.zeros(self.layout.cache_shape, np.float32) for name in names}
        return PackageCache(arrays, self._runtime.new_state())

    def give_back(self, cache: PackageCache) -> None:
        if cache.arrays:
            self._spare.append(cache)

    def forward(
        self, columns: Sequence[_Column], past: Bools, own: Bools, cache: PackageCache, function: PackageFunction
    ) -> CallOutput:
        """Feeds R columns (at most the function's rows) and writes their keys and values into `cache`.

        Args:
            past: the slots that each column sees, as they were before the call, [R, slots].
            own: the columns of the call that each sees, including itself, [R, R].

        Raises:
            DrafterFault: logits, keys or values are not finite; then nothing is written.
            RuntimeFault: the device failed.
        """
        inputs = self._fill_buffers(function, columns, past, own) | cache.arrays
        fresh = self._check_output(function, self._runtime.call(function.name, inputs, cache.state), len(columns))
        slots = [column.slot for column in columns]
        for name, rows in zip(cache.arrays, (fresh.keys, fresh.values), strict=False):
            cache.arrays[name][:, :, slots] = rows
        return fresh

    def _fill_buffers(
        self, function: PackageFunction, columns: Sequence[_Column], past: Bools, own: Bools
    ) -> dict[str, NDArray[Any]]:
        """Returns the function's buffers filled with `columns`; unused rows are masked and not written."""
        if function.name not in self._buffers:
            self._buffers[function.name] = {
                tensor.name: np.zeros(tensor.shape, np.int32 if tensor.integer else np.float32)
                for tensor in self.layout.inputs(function)
                if tensor.name not in _CACHE_INPUTS
            }
        buffers, count, slots = self._buffers[function.name], len(columns), self.layout.slots
        positions = [column.position for column in columns]
        buffers["x"][:] = 0
        buffers["x"][0, :, 0, :count] = self.package.embedding[[column.token for column in columns]].T
        buffers["cos"][0, 0, :count] = self._cos[positions]
        buffers["sin"][0, 0, :count] = self._sin[positions]
        mask = buffers["mask"][0, 0]
        mask[:] = MASK_VALUE
        mask[:count, :slots][past] = 0
        mask[:count, slots : slots + count][own] = 0
        if self.layout.mode is Mode.HYBRID:
            buffers["pos"][0] = columns[0].slot
        if self.layout.mode is Mode.ONEHOT:
            buffers["write"][:] = 0
            buffers["write"][0, 0, [column.slot for column in columns], np.arange(count)] = 1
        return buffers

    def _check_output(self, function: PackageFunction, outputs: Outputs, count: int) -> CallOutput:
        none = np.empty((0, 0, 0, 0), np.float32)
        keys, values = (outputs.get(name, none)[:, :, :count] for name in ("k_new", "v_new"))
        if not (np.isfinite(keys).all() and np.isfinite(values).all()):
            raise DrafterFault(f"{self._runtime.name} returned keys that are NaN or infinite")
        chunks = range(len(self.layout.architecture.head_chunks) if function.logits else 0)
        parts = [outputs[f"logits_{chunk}"][0, :, 0, :count] for chunk in chunks]
        logits = np.concatenate(parts).T if parts else np.empty((0, 0), np.float32)
        if not np.isfinite(logits).all():
            raise DrafterFault(
                f"{self._runtime.name} returned logits that are NaN or infinite; drafting is off for this request"
            )
        return CallOutput(logits, keys, values)


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
        self._free: Bools = np.ones(self._layout.slots, bool)
        self._columns: list[_Column] = []

    @property
    def length(self) -> int:
        return len(self._columns)

    def prefill(self, tokens: Sequence[int], start: int = 0) -> int:
        self._keep_columns(self._columns[:start])
        piece = tokens[: self._layout.prefill.rows]
        if piece:
            self.read(piece, self._layout.function_for(len(piece)))
        return len(piece)

    def read(self, tokens: Sequence[int], function: PackageFunction) -> CallOutput:
        """Feeds the next tokens of a text without branches, at most as many as `function` has rows; see `forward`."""
        first, end = self.length, self.length + len(tokens)
        self._append_columns(tokens, range(first, end), range(first - 1, end - 1))
        return self._forward(first, np.tri(len(tokens), end, first, dtype=np.bool_), function)

    @staticmethod
    def forward(texts: Sequence[CoreMLKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`, text after text and in pieces of the largest function's rows.

        Raises:
            DrafterFault: the context or the cache is full, a token is unknown, or the logits are not finite.
            RuntimeFault: the device failed.
        """
        logits = [part for text, rows in zip(texts, new, strict=True) for part in text._feed(rows)]
        return mx.array(np.concatenate(logits))

    def _feed(self, new: NewRows) -> Iterator[NDArray[np.float32]]:
        self._keep_columns(self._columns[: new.start])  # drops the columns of a forward that failed
        tokens = np.array(new.tokens).tolist()
        self._append_columns(tokens, new.positions[new.start :].tolist(), new.parents)
        max_rows = self._layout.largest.rows
        for first in range(new.start, new.end, max_rows):
            end = min(first + max_rows, new.end)
            seen = new.seen[first - new.start : end - new.start, :end]
            yield self._forward(first, seen, self._layout.function_for(end - first)).logits

    def keep(self, prefix: int, columns: Ints) -> None:
        self._keep_columns([*self._columns[:prefix], *(self._columns[column] for column in columns.tolist())])

    def close(self) -> None:
        self._give_back()

    def _append_columns(self, tokens: Sequence[int], positions: Sequence[int], parents: Sequence[int]) -> None:
        if max(positions) >= self._layout.context:
            raise DrafterFault(
                f"the draft's context of {self._layout.context} tokens is full; drafting is off from here on"
            )
        if max(tokens) >= self._layout.architecture.vocab_size:
            raise DrafterFault(
                f"token {max(tokens)} is not in the draft's vocabulary of {self._layout.architecture.vocab_size}"
            )
        for token, position, parent in zip(tokens, positions, parents, strict=True):
            self._columns.append(_Column(token, position, self._columns[parent] if parent >= 0 else None))

    def _keep_columns(self, kept: list[_Column]) -> None:
        """Keeps only these columns, in this order, and frees the slots of the others."""
        self._free[[column.slot for column in {*self._columns}.difference(kept) if column.slot >= 0]] = True
        self._columns = kept

    def _forward(self, first: int, seen: Bools, function: PackageFunction) -> CallOutput:
        """Feeds R columns from `first` on; each row of `seen` [R, first + R] marks the columns that one sees."""
        columns = self._columns[first : first + len(seen)]
        self._assign_slots(columns, first, function)
        past = np.zeros((len(columns), self._layout.slots), bool)
        past[:, [column.slot for column in self._columns[:first]]] = seen[:, :first]
        return self._host.forward(columns, past, seen[:, first:], self._cache, function)

    def _assign_slots(self, columns: Sequence[_Column], fed: int, function: PackageFunction) -> None:
        """Gives each column a free slot; `fed` columns have one already."""
        slots = self._free_slots(len(columns), function)
        if len(slots) < len(columns) and fed and self._layout.mode is Mode.HYBRID:
            self._defragment(fed)
            slots = self._free_slots(len(columns), function)
        if len(slots) < len(columns):
            raise DrafterFault(
                f"the draft's cache of {self._layout.slots} slots has fewer than {len(columns)} left; "
                "drafting is off for this request"
            )
        self._free[slots] = False
        for column, slot in zip(columns, slots, strict=True):
            column.slot = slot

    def _free_slots(self, count: int, function: PackageFunction) -> list[int]:
        """Returns the first `count` free slots, or fewer if there are no more.

        In hybrid mode a call writes a run of slots, as many as `function` has rows, and all of them must be free.
        """
        if self._layout.mode is not Mode.HYBRID:
            return [int(slot) for slot in np.flatnonzero(self._free)[:count]]
        ends = np.convolve(self._free, np.ones(function.rows, int), mode="valid")
        starts = np.flatnonzero(ends == function.rows)
        return list(range(starts[0], starts[0] + count)) if starts.size else []

    def _defragment(self, count: int) -> None:
        """Feeds the first `count` columns again without gaps, because the free slots are scattered and a run of them is
        needed."""
        self._free[:] = True
        columns, step = self._columns[:count], self._layout.prefill.rows
        numbers: dict[_Column | None, int] = {column: number for number, column in enumerate(columns)}
        seen = ancestor_mask([numbers.get(column.parent, ROOT) for column in columns])
        for first in range(0, count, step):
            end = min(first + step, count)
            self._forward(first, seen[first:end, :end], self._layout.prefill)


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

    Args:
        min_tokens: the model itself reads shorter prompts, and the tokens beyond the package's context.
    """

    def __init__(self, package: Package, runtime: CoreMLRuntime, min_tokens: int) -> None:
        self.min_tokens, self.package = min_tokens, package
        self.note = f"prompts of {min_tokens} tokens and more are read by {runtime.name}"
        self._host = PackageHost(package, runtime)

    def __call__(self, tokens: Sequence[int]) -> Iterator[LayerKVs]:
        if len(tokens) < self.min_tokens:
            return
        prefill, rows = self._host.layout.prefill, CoreMLKVRows(self._host)
        end = min(len(tokens), self._host.layout.context)
        log.debug("the package reads %d of the prompt's %d tokens", end, len(tokens))
        try:
            for first in range(0, end, prefill.rows):
                fresh = rows.read(tokens[first : min(first + prefill.rows, end)], prefill)
                layers = zip(fresh.keys[:, None], fresh.values[:, None], strict=True)
                yield tuple((mx.array(keys), mx.array(values)) for keys, values in layers)
        except OutriderError as error:
            raise ReadingFault(f"the prompt can't be read by the package: {error}") from error
        finally:
            rows.close()
