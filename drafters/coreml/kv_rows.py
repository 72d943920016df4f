"""The predict thread's side of a tree: the slot of each node's keys, the mask of each row, and the scores.

Nothing here is called from another thread, but a `Node` is shared with the caller's thread; each field has one writer.
A node's ancestors are found by walking up, so a call's mask is that of the current tree. `SlotMap` tracks the free
slots of a cache. Scores follow the engine's sampling contract, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from outrider.drafters.coreml.host import CallOutput, HostRows, PackageHost
from outrider.drafters.coreml.layout import Mode, PackageFunction
from outrider.drafters.drafter import DrafterFault
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.steps import SamplingMetadata, Step, score
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Node:
    """The caller's thread writes `number`, `fork`, `children`, `job`, `dropped`; the predict thread the rest.

    `token` None: the parent's own choice, known when `job` is done, as are the scores after it: row `row` of `step`.
    `fork` is the position of the last token down to it that was given, not chosen here. `slot` -1: not in the cache.
    """

    number: int
    parent: Node | None
    position: int
    token: int | None
    fork: int
    job: Future[None] | None = None
    children: list[Node] = field(default_factory=list)
    dropped: bool = False
    committed: bool = False
    slot: int = -1
    step: Step | None = None
    row: int = 0

    @property
    def known_token(self) -> int:
        """`token`, after waiting for it."""
        if self.token is None and self.job is not None:
            self.job.result()
        if self.token is None:
            raise DrafterFault("a drafted token was dropped before it was known")
        return self.token

    @property
    def known_step(self) -> Step:
        """`step`, after waiting for it."""
        if self.job is not None:
            self.job.result()
        if self.step is None:
            raise DrafterFault("a drafted token was dropped before its scores were known")
        return self.step


class SlotMap:
    """Tracks `count` slots, all free at first."""

    def __init__(self, count: int) -> None:
        self._free: NDArray[np.bool_] = np.ones(count, bool)

    @property
    def free(self) -> int:
        return int(self._free.sum())

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


class CoreMLKVRows:
    """One request's cache and scores on `host`; a row's own token is the best, or with `draws` drawn from a q."""

    def __init__(
        self,
        host: PackageHost,
        sampling: SamplingParams,
        draws: Draws | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        self._host = host
        self._layout = host.layout
        self._cache = host.new_cache()
        vocab_size = self._layout.architecture.vocab_size
        self._sampler = Sampler(sampling, vocab_size, normalised=False, constraint=constraint)
        self._draws = draws
        self._slots = SlotMap(self._layout.slots)
        self._seen = np.zeros(self._layout.slots, bool)  # the slots with committed keys
        self._committed: list[Node] = []
        self._pending: list[Node] = []
        self._fault: OutriderError | None = None

    def read(self, nodes: Sequence[Node]) -> None:
        """Feeds the last committed tokens, few enough for logits; the last one gets its scores."""
        fresh = self._feed_line(nodes, self._layout.smallest(len(nodes)) or self._layout.largest)
        self._committed += nodes
        self._score(nodes[-1:], None if fresh.logits is None else fresh.logits[-1:])

    def read_unscored(self, nodes: Sequence[Node]) -> None:
        """Feeds the next committed tokens for their keys only."""
        self._feed_line(nodes, self._layout.prefill)
        self._committed += nodes

    def grow(self, nodes: Sequence[Node]) -> None:
        """Feeds new nodes after their parents, except those that were dropped meanwhile.

        Raises:
            OutriderError: this call failed, or an earlier one did, whose nodes' descendants can't be fed.
        """
        if self._fault is not None:
            raise self._fault
        try:
            self._grow([node for node in nodes if not node.dropped])
        except OutriderError as error:
            self._fault = error
            raise

    def _grow(self, alive: Sequence[Node]) -> None:
        for node in alive:
            above = node.parent
            if node.token is None and above is not None and above.step is not None:
                node.token = above.step.best()[above.row]
        most = self._layout.largest.rows
        for first in range(0, len(alive), most):
            batch = alive[first : first + most]
            fresh = self._feed_tree(batch, self._layout.smallest(len(batch)) or self._layout.largest)
            self._pending += batch
            self._score(batch, fresh.logits)

    def commit(self, path: Sequence[Node], lost: Sequence[Node]) -> None:
        """Commits `path` and frees the slots of `lost`; only the last committed node keeps its scores."""
        self._committed[-1].step = None
        for node in path:
            node.committed = True
            self._seen[node.slot] = True
            node.step = node.step if node is path[-1] else None
        self._committed += path
        gone = {id(node) for node in (*path, *lost)}
        self._pending = [node for node in self._pending if id(node) not in gone]
        self._slots.give_back(node.slot for node in lost if node.slot >= 0)
        for node in lost:
            node.slot, node.step = -1, None

    def close(self) -> None:
        self._host.give_back(self._cache)
        self._committed.clear()
        self._pending.clear()

    def _feed_line(self, nodes: Sequence[Node], function: PackageFunction) -> CallOutput:
        """Feeds committed tokens, each seeing all before it."""
        count = len(nodes)
        self._place(nodes, function)
        past = np.broadcast_to(self._seen, (count, self._seen.size))
        fresh = self._forward(nodes, past, np.tri(count, dtype=bool), function)
        for node in nodes:
            node.committed = True
            self._seen[node.slot] = True
        return fresh

    def _feed_tree(self, nodes: Sequence[Node], function: PackageFunction) -> CallOutput:
        """Feeds pending nodes, each seeing the committed tokens and its own ancestors."""
        self._place(nodes, function)
        rows = {id(node): row for row, node in enumerate(nodes)}
        past = np.repeat(self._seen[None], len(nodes), axis=0)
        own = np.zeros((len(nodes), len(nodes)), bool)
        for row, node in enumerate(nodes):
            above: Node | None = node
            while above is not None and not above.committed:
                if id(above) in rows:
                    own[row, rows[id(above)]] = True
                else:
                    past[row, above.slot] = True
                above = above.parent
        return self._forward(nodes, past, own, function)

    def _forward(
        self, nodes: Sequence[Node], past: NDArray[np.bool_], own: NDArray[np.bool_], function: PackageFunction
    ) -> CallOutput:
        tokens = [node.known_token for node in nodes]
        if max(tokens) >= self._layout.architecture.vocab_size:
            raise DrafterFault(
                f"token {max(tokens)} is not in the draft's vocabulary of {self._layout.architecture.vocab_size}"
            )
        rows = HostRows(tokens, [node.position for node in nodes], [node.slot for node in nodes], past, own)
        return self._host.forward(rows, self._cache, function)

    def _score(self, nodes: Sequence[Node], logits: NDArray[np.float32] | None) -> None:
        if logits is None:
            return
        histories = [self._history(node) for node in nodes] if self._sampler.needs_history else None
        metadata = SamplingMetadata(self._sampler, [node.position + 1 for node in nodes], histories)
        with mx.stream(mx.cpu):  # on a Mac the GPU is the target's
            rows, forks = mx.array(logits), [node.fork for node in nodes]
            step = score([metadata], rows) if self._draws is None else self._draws.score(metadata, rows, forks)
            step.best()  # so that another thread may read the step's results
        for row, node in enumerate(nodes):
            node.step, node.row = step, row

    def _history(self, node: Node) -> list[int]:
        """Returns the last tokens down to `node`, as many as its scores depend on."""
        path: list[int] = []
        above: Node | None = node
        while above is not None and len(path) < self._sampler.reach:
            path.append(above.known_token)
            above = above.parent
        return path[::-1]

    def _place(self, nodes: Sequence[Node], function: PackageFunction) -> None:
        """Gives each node a slot: any free one, or consecutive ones if the mode writes runs."""
        if self._layout.mode is Mode.HYBRID:
            slots = self._slots.take_run(len(nodes), function.rows)
            if slots is None and self._committed:
                self._pack()
                slots = self._slots.take_run(len(nodes), function.rows)
        else:
            slots = self._slots.take(len(nodes))
        if slots is None:
            raise DrafterFault(
                f"the draft's cache of {self._layout.slots} slots has no {len(nodes)} left; "
                "no drafting for this request"
            )
        for node, slot in zip(nodes, slots, strict=True):
            node.slot = slot

    def _pack(self) -> None:
        """Feeds everything again without gaps, because the free slots are scattered and a run of them is needed."""
        committed, self._committed = self._committed, []
        pending = sorted((node for node in self._pending if not node.dropped), key=lambda node: node.position)
        self._slots.clear()
        self._seen[:] = False
        step = self._layout.prefill.rows
        for first in range(0, len(committed), step):
            self._feed_line(committed[first : first + step], self._layout.prefill)
        for first in range(0, len(pending), step):
            self._feed_tree(pending[first : first + step], self._layout.prefill)
        self._committed = committed
