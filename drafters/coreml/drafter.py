"""The drafter `coreml`: a converted model on the Neural Engine, or on the unit where it passes its trial.

Its token trees are the engine's (`engine.tree`), over columns in a package's cache. A column has a slot there, which it
keeps: columns that are dropped free theirs, so rollback and commits move nothing. Each call gets its own mask and
positions. Scores are computed on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import finalize

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml import package, selection
from outrider.drafters.coreml.layout import Mode, PackageFunction
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import CallOutput, HostRows, PackageHost, Runtime, cache_bytes, open_runtime
from outrider.drafters.coreml.selection import OnePackage, Packages, PackageSource, Tell
from outrider.drafters.drafter import Drafter, DrafterFault
from outrider.engine.flat import Bools, Ints
from outrider.engine.kv_rows import NewRows
from outrider.engine.loading import find
from outrider.engine.prompt_cache import CachedPrefix, PromptCache, SavedPrefix
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.steps import Step
from outrider.engine.tree import Tree, TreeInput
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import ModelError
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost

Progress = Callable[[int, int], None]


class SlotMap:
    """Tracks `count` slots, all free at first."""

    def __init__(self, count: int) -> None:
        self._free: NDArray[np.bool_] = np.ones(count, bool)

    def take(self, count: int) -> list[int] | None:
        """Takes and returns the first `count` free slots; None if there are fewer."""
        slots = np.flatnonzero(self._free)[:count]
        if len(slots) < count:
            return None
        self._free[slots] = False
        return [int(slot) for slot in slots]

    def take_run(self, count: int, run: int) -> list[int] | None:
        """Takes the first `count` of `run` consecutive free slots; the rest stay free but are written. None: no run."""
        ends = np.convolve(self._free, np.ones(run, int), mode="valid")
        starts = np.flatnonzero(ends == run)
        if not starts.size:
            return None
        first = int(starts[0])
        self._free[first : first + count] = False
        return list(range(first, first + count))

    def give_back(self, slots: Iterable[int]) -> None:
        self._free[list(slots)] = True

    def clear(self) -> None:
        self._free[:] = True


@dataclass(slots=True, eq=False)
class _Column:
    """A fed token, which follows that of `parent`. `slot` -1: it is not in the cache."""

    token: int
    position: int
    parent: _Column | None
    slot: int = -1


class CoreMLKVRows:
    """`engine.kv_rows.KVRows` of one tree on `host`, which nothing is saved of. Not lazy: a forward returns when it is
    complete."""

    lazy = False
    whole = True

    def __init__(self, host: PackageHost) -> None:
        self._host, self._layout = host, host.layout
        self._cache = host.new_cache()
        self._give_back = finalize(self, host.give_back, self._cache)
        self._slots = SlotMap(self._layout.slots)
        self._columns: list[_Column] = []

    def prefill(self, tokens: Sequence[int], progress: Progress | None, total: int, start: int = 0) -> None:
        self._keep(self._columns[:start])
        step = self._layout.prefill.rows
        for first in range(start, len(tokens), step):
            chunk = tokens[first : first + step]
            end = first + len(chunk)
            self._add(chunk, range(first, end), range(first - 1, end - 1))
            function = self._layout.smallest(len(chunk)) or self._layout.prefill
            self._call(first, np.tri(len(chunk), end, first, dtype=np.bool_), function)
            if progress is not None and len(tokens) > step:
                progress(end, total)

    @staticmethod
    def forward(texts: Sequence[CoreMLKVRows], new: Sequence[NewRows]) -> mx.array:
        """Implements `KVRows.forward`, text after text and in pieces of the largest function's rows.

        Raises:
            DrafterFault: the context or the cache is full, a token is unknown, or the logits are not finite.
            RuntimeFault: the device failed.
        """
        logits = [part for text, rows in zip(texts, new, strict=True) for part in text._feed(rows)]
        return mx.array(np.concatenate(logits))

    def _feed(self, new: NewRows) -> list[NDArray[np.float32]]:
        self._keep(self._columns[: new.start])  # drops what a forward that failed has added
        tokens = np.array(new.tokens).tolist()
        self._add(tokens, new.positions[new.start :].tolist(), new.parents)
        parts, most = [], self._layout.largest.rows
        for first in range(new.start, new.end, most):
            end = min(first + most, new.end)
            seen = new.seen[first - new.start : end - new.start, :end]
            fresh = self._call(first, seen, self._layout.smallest(end - first) or self._layout.largest)
            parts += [] if fresh.logits is None else [fresh.logits]
        return parts

    def keep(self, prefix: int, columns: Ints) -> None:
        self._keep([*self._columns[:prefix], *(self._columns[column] for column in columns.tolist())])

    def save(self, count: int) -> SavedPrefix:
        """Returns an empty prefix: nothing is kept for other texts."""
        return SavedPrefix(0, ())

    def restore(self, start: CachedPrefix) -> None:
        """Does nothing: no prefix is kept."""

    def close(self) -> None:
        self._give_back()

    def _add(self, tokens: Sequence[int], positions: Sequence[int], parents: Sequence[int]) -> None:
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

    def _keep(self, kept: list[_Column]) -> None:
        """Keeps only these columns, in this order, and frees the slots of the others."""
        stay = set(map(id, kept))
        self._slots.give_back(c.slot for c in self._columns if id(c) not in stay and c.slot >= 0)
        self._columns = kept

    def _call(self, first: int, seen: Bools, function: PackageFunction) -> CallOutput:
        """Feeds the columns from `first` on, of which each row of `seen` [R, first + R] sees some."""
        columns = self._columns[first : first + len(seen)]
        self._place(columns, first, function)
        past = np.zeros((len(columns), self._layout.slots), bool)
        past[:, [column.slot for column in self._columns[:first]]] = seen[:, :first]
        tokens, positions = [column.token for column in columns], [column.position for column in columns]
        rows = HostRows(tokens, positions, [column.slot for column in columns], past, seen[:, first:])
        return self._host.forward(rows, self._cache, function)

    def _place(self, columns: Sequence[_Column], fed: int, function: PackageFunction) -> None:
        """Gives each column a slot: any free one, or consecutive ones if the mode writes runs."""
        if self._layout.mode is Mode.HYBRID:
            slots = self._slots.take_run(len(columns), function.rows)
            if slots is None and fed:
                self._pack(fed)
                slots = self._slots.take_run(len(columns), function.rows)
        else:
            slots = self._slots.take(len(columns))
        if slots is None:
            raise DrafterFault(
                f"the draft's cache of {self._layout.slots} slots has no {len(columns)} left; "
                "no drafting for this request"
            )
        for column, slot in zip(columns, slots, strict=True):
            column.slot = slot

    def _pack(self, count: int) -> None:
        """Feeds the first `count` columns again without gaps, because the free slots are scattered and a run of them is
        needed."""
        self._slots.clear()
        numbers = {id(column): number for number, column in enumerate(self._columns[:count])}
        seen, step = np.eye(count, dtype=np.bool_), self._layout.prefill.rows
        for number, column in enumerate(self._columns[:count]):
            if column.parent is not None:
                seen[number] |= seen[numbers[id(column.parent)]]
        for first in range(0, count, step):
            end = min(first + step, count)
            self._call(first, seen[first:end, :end], self._layout.prefill)


class CoreMLTree(Tree):
    """A token tree over a package."""

    def scored(self, begun: Sequence[TreeInput], logits: mx.array) -> Step:
        with mx.stream(mx.cpu):  # on a Mac the GPU is the target's
            step = super().scored(begun, logits)
            step.best()
        return step


class CoreMLDrafter:
    """A `Drafter` over `package`, run by `runtime`, which is called on one thread only."""

    backend = "coreml"

    def __init__(self, package: Package, runtime: Runtime, note: str = "") -> None:
        self.note = note or f"drafting with {runtime.name}"
        self.vocab_size = package.layout.architecture.vocab_size
        self.context_length = package.layout.context
        self.parameters = package.manifest.parameters
        self.weight_bytes = package.weight_bytes
        self.prompt_cache = PromptCache(KvCost(per_text=cache_bytes(package.layout)))
        self._host = PackageHost(package, runtime)

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Progress | None = None,
        constraint: Constraint | None = None,
        cached: int = 1,
    ) -> CoreMLTree:
        if not 0 < len(tokens) <= self.context_length:
            raise DrafterFault(
                f"{len(tokens)} tokens to read; expected 1 to {self.context_length}, the draft's context"
            )
        sampler = Sampler(sampling, self.vocab_size, normalised=False, constraint=constraint)
        draws = Draws.of(sampling, cached)
        return CoreMLTree(CoreMLKVRows(self._host), sampler, self.context_length, tokens, progress, draws)


def load(model: str, tell: Tell) -> Drafter:
    """Returns the drafter for `model`: a package directory, a model directory or a Hugging Face id.

    A model is converted first (once). MLX drafts if Core ML's trials fail on every unit, or there is no Core ML. `tell`
    receives a sentence about each.

    Raises:
        ModelError: there is no such model, the converter refuses it, or a package without its model can't run here.
    """
    directory, checkpoint = Path(model).expanduser(), None
    packages: PackageSource
    if (directory / package.MANIFEST).is_file():
        packages = OnePackage(open_package(directory))
    else:
        checkpoint = find(model)
        packages = Packages(checkpoint, tell)
    chosen = selection.choose(packages, tell)
    sentence = chosen.sentence
    tell(sentence)
    if chosen.package is not None and chosen.row is not None:
        try:
            return CoreMLDrafter(chosen.package, open_runtime(chosen.package, chosen.row.units), note=sentence)
        except ModelError as error:  # although its trial succeeded before
            sentence = f"{error}, drafting with MLX instead"
            tell(sentence)
    if checkpoint is None:
        raise ModelError(f"{sentence}; give the model that this package was converted from, not the package")
    from outrider.drafters.mlx import MlxDrafter

    return MlxDrafter.load(str(checkpoint), tell)
