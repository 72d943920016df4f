"""The drafter `coreml`: a converted model on the Neural Engine, or in the reference interpreter if there is none.

`CoreMLTree` is a token tree over a converted model; each call gets its own mask and positions. It uses two threads. The
caller's thread owns the nodes and submits jobs. One predict thread (`kv_rows`) runs them in order, and only it accesses
the cache and the scores. A job whose nodes were dropped in the meantime is skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from outrider.drafters.coreml import package, selection
from outrider.drafters.coreml.host import PackageHost, cache_bytes
from outrider.drafters.coreml.interpreter import runtime_of
from outrider.drafters.coreml.kv_rows import CoreMLKVRows, Node
from outrider.drafters.coreml.package import Package, open_package
from outrider.drafters.coreml.runtimes import Runtime
from outrider.drafters.coreml.selection import OnePackage, PackageSource, Tell
from outrider.drafters.drafter import Drafter, DrafterFault
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.residual import DrawnStep, Draws
from outrider.engine.tree_feed import Candidate
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import SparseQ

Progress = Callable[[int, int], None]


class CoreMLTree:
    """Implements `drafters.drafter.DrawingTree`. Node 0 is the last token of the prompt."""

    def __init__(
        self,
        host: PackageHost,
        predict: Executor,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Progress | None = None,
        draws: Draws | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """Reads `tokens` (at least one) before it returns; `progress` is called on this thread.

        With `draws` a node's own continuation is drawn instead of the best one.

        Raises:
            DrafterFault: the tokens do not fit the context, or the device failed.
        """
        self._predict, self._layout = predict, host.layout
        self._columns: CoreMLKVRows = predict.submit(CoreMLKVRows, host, sampling, draws, constraint).result()
        self._committed: list[Node] = []
        self._nodes: dict[int, Node] = {}
        self.root, self.next_node = 0, 0
        with ExitStack() as undo:  # if the reading fails or is cancelled
            undo.callback(predict.submit, self._columns.close)
            self._read(tokens, False, progress)
            undo.pop_all()

    cached = 0

    @property
    def committed_len(self) -> int:
        return len(self._committed)

    @property
    def room(self) -> int:
        return self._layout.context - len(self._committed)

    def column_tokens(self) -> list[int]:
        return [node.known_token for node in self._committed]

    def child(self, node: int, token: int, given: bool | None = None) -> int | None:
        parent = self._node(node)
        children = [child for child in parent.children if given is None or (child.fork != parent.fork) == given]
        return next((child.number for child in children if child.known_token == token), None)

    def feed(self, parents: Sequence[int], tokens: Sequence[int | None]) -> list[int]:
        first = self.next_node
        if any(token is None and parent >= first for parent, token in zip(parents, tokens, strict=True)):
            raise InvalidRequest("a token is None and its parent is fed in the same call; expected a token")
        fresh = [self._new_node(parent, token) for parent, token in zip(parents, tokens, strict=True)]
        job = self._predict.submit(self._columns.grow, fresh)
        for node in fresh:
            node.job = job
        return [node.number for node in fresh]

    def best(self, nodes: Sequence[int]) -> list[int]:
        chosen = [self._node(number) for number in nodes]
        return [node.known_step.best()[node.row] for node in chosen]

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        entries = [self._node(number) for number in nodes]
        return [node.known_step.candidates([node.row], count)[0] for node in entries]

    def drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        steps = [(self._node(number).known_step, self._node(number).row) for number in nodes]
        qs = [step.q(row) for step, row in steps if isinstance(step, DrawnStep)]
        return SparseQ(np.stack([ids for ids, _ in qs]), np.stack([probs for _, probs in qs])) if qs else None

    def read(self, tokens: Sequence[int], more: bool = False) -> None:
        lost = [node for number, node in self._nodes.items() if number != self.root]
        for node in lost:
            node.dropped = True
        self._nodes = {}
        self._committed[-1].children = []
        self._predict.submit(self._columns.commit, [], lost)
        self._read(tokens, more)

    def commit(self, path: Sequence[int]) -> None:
        if not path:
            return
        nodes = [self._node(number) for number in path]
        for above, node in zip([self._committed[-1], *nodes], nodes, strict=False):
            if node.parent is not above:
                raise InvalidRequest(f"node {node.number} can't be committed: it does not follow node {above.number}")
        kept: dict[int, Node] = {}
        pending = [nodes[-1]]
        while pending:
            node = pending.pop()
            kept[node.number] = node
            pending += node.children
        final = {self.root, *path}
        lost = [node for number, node in self._nodes.items() if number not in kept and number not in final]
        for node in lost:
            node.dropped = True
        for node in (self._committed[-1], *nodes[:-1]):
            node.children = []
        self._predict.submit(self._columns.commit, nodes, lost)
        self._committed += nodes
        self._nodes = kept
        self.root = path[-1]

    def close(self, spoilt: bool = False) -> None:
        for node in self._nodes.values():
            node.dropped = True
        self._nodes = {}
        self._predict.submit(self._columns.close)

    def _read(self, tokens: Sequence[int], more: bool, progress: Progress | None = None) -> None:
        """Feeds final tokens: most of them by the prefill, the rest with logits; the last one becomes the root."""
        done, total = len(self._committed), len(self._committed) + len(tokens)
        if not done < total <= self._layout.context:
            raise DrafterFault(f"{total} tokens to read; expected 1 to {self._layout.context}, the draft's context")
        for position, token in enumerate(tokens, done):
            above = self._committed[-1] if self._committed else None
            self._committed.append(Node(-1, above, position, token, position))
        prefill, scored = self._layout.prefill.rows, self._layout.largest.rows
        while done < total:
            left = total - done
            if more or left > scored:
                end = done + min(prefill, left if more else left - 1)
                job = self._predict.submit(self._columns.read_unscored, self._committed[done:end])
            else:
                end = total
                job = self._predict.submit(self._columns.read, self._committed[done:end])
            job.result()
            done = end
            if progress:
                progress(done, total)
        if not more:
            root = self._committed[-1]
            root.number = self.root = self.next_node
            self._nodes = {self.root: root}
            self.next_node += 1

    def _node(self, number: int) -> Node:
        if number not in self._nodes:
            raise InvalidRequest(f"node {number} is not in the tree; expected one that was fed and not dropped")
        return self._nodes[number]

    def _new_node(self, parent: int, token: int | None) -> Node:
        above = self._node(parent)
        if above.position + 1 >= self._layout.context:
            raise DrafterFault(
                f"the draft's context of {self._layout.context} tokens is full; drafting is off from here on"
            )
        position = above.position + 1
        node = Node(self.next_node, above, position, token, above.fork if token is None else position)
        above.children.append(node)
        self._nodes[node.number] = node
        self.next_node += 1
        return node


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
        self._runtime = runtime
        self._host = PackageHost(package, runtime)
        self._predict = ThreadPoolExecutor(max_workers=1, thread_name_prefix="predict")

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> CoreMLTree:
        return CoreMLTree(self._host, self._predict, tokens, sampling, progress, None, constraint)

    def open_drawing(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        cached: int,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> CoreMLTree:
        return CoreMLTree(self._host, self._predict, tokens, sampling, progress, Draws.of(sampling, cached), constraint)

    def close(self) -> None:
        """Ends the predict thread and releases the device."""
        self._predict.submit(self._runtime.close).result()
        self._predict.shutdown()


def load(model: str, tell: Tell) -> Drafter:
    """Returns the drafter for `model`: a package directory, a model directory or a Hugging Face id.

    A model is converted first (once). Without Core ML the reference interpreter runs it; if Core ML's trials fail on
    every unit, MLX does. `tell` receives a sentence about each.

    Raises:
        ModelError: there is no such model, or the converter refuses it.
    """
    packages, checkpoint = _packages(model, tell)
    placed = selection.place(packages, tell)
    sentence = placed.sentence
    tell(sentence)
    if placed.package is not None and placed.units is not None:
        try:
            return CoreMLDrafter(placed.package, runtime_of(placed.package, placed.units), note=sentence)
        except ModelError as error:  # although its trial succeeded before
            sentence = f"{error}, drafting with MLX instead"
            tell(sentence)
    if checkpoint is None:
        raise ModelError(f"{sentence}; give the model that this package was converted from, not the package")
    from outrider.drafters.mlx import MlxDrafter

    return MlxDrafter.load(str(checkpoint), tell)


def _packages(model: str, tell: Tell) -> tuple[PackageSource, Path | None]:
    """Returns the packages that the drafter may run, and their checkpoint if it is known."""
    directory = Path(model).expanduser()
    if (directory / package.FILE).is_file():
        return OnePackage(open_package(directory)), None
    checkpoint = selection.checkpoint_of(model, tell)
    return selection.packages_of(checkpoint, tell), checkpoint
