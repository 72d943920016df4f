"""A token tree: committed tokens, and the drafted tokens that grow from them.

Keys and values are in `engine.kv_rows`; `engine.steps` chooses tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice

import mlx.core as mx
import numpy as np

from outrider.engine.flat import Bools, Ints
from outrider.engine.kv_rows import KVRows, NewRows
from outrider.engine.prompt_cache import PromptCache, SavedPrefix
from outrider.engine.residual import DrawnStep, Draws
from outrider.engine.sampling import Sampler, SamplingMetadata
from outrider.engine.steps import Step, make_step
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.schema import Halves
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import ROOT, Candidate, SparseQ, TreeFeed

_INITIAL_WINDOW_COLUMNS = 256  # the window's initial columns


class TreeLayout:
    """Maps columns 0 to `end` - 1 of a tree's row to positions and to the columns that each token sees. Pure numpy.

    Columns below `prefix` hold committed text, column i the token at position i, and every token sees them. Then come
    the window's tokens in the order of feeding; each sees the prefix, its ancestors and itself.
    """

    def __init__(self, prefix: int) -> None:
        self.prefix = self.end = prefix
        self._seen = np.zeros((_INITIAL_WINDOW_COLUMNS, _INITIAL_WINDOW_COLUMNS), dtype=np.bool_)
        self._positions = np.arange(prefix + _INITIAL_WINDOW_COLUMNS, dtype=np.int32)

    @property
    def positions(self) -> Ints:
        """The absolute position of the token in each column, [end]."""
        return self._positions[: self.end]

    def add(self, parents: Sequence[int]) -> None:
        """Appends a column for a child of each parent column (-1: the start of the text).

        A parent may be a column appended earlier in the same call.
        """
        start = self.end
        self._make_room(start - self.prefix + len(parents))
        for column, parent in enumerate(parents, start):
            inner = column - self.prefix
            if parent >= self.prefix:
                self._seen[inner] = self._seen[parent - self.prefix]
            else:
                self._seen[inner] = False  # clears an earlier token's
            self._seen[inner, inner] = True
            self._positions[column] = self._positions[parent] + 1 if parent >= 0 else 0
        self.end += len(parents)

    def seen(self, start: int) -> Bools:
        """Returns what the columns from `start` on see: [end - start, end]."""
        visible = np.ones((self.end - start, self.end), dtype=np.bool_)
        visible[:, self.prefix :] = self._seen[start - self.prefix : self.end - self.prefix, : self.end - self.prefix]
        return visible

    def compact(self, committed: Sequence[int], pending: Sequence[int]) -> Ints:
        """Keeps only these columns of the window (both ascending); the `committed` ones join the prefix.

        Returns `committed` + `pending`; the i-th of them becomes column (old) `prefix` + i.
        """
        kept = np.array([*committed, *pending], dtype=np.int32)
        old = self.prefix
        self.prefix, self.end = old + len(committed), old + len(kept)
        inner = kept[len(committed) :] - old
        self._seen[: len(inner), : len(inner)] = self._seen[np.ix_(inner, inner)]
        self._positions[old : self.end] = self._positions[kept]
        return kept

    def _make_room(self, wanted: int) -> None:
        if wanted > len(self._seen):
            self._seen = np.pad(self._seen, (0, 2 * wanted - len(self._seen)))
        if self.prefix + wanted > len(self._positions):
            self._positions = np.pad(self._positions, (0, 2 * (self.prefix + wanted) - len(self._positions)))


@dataclass(slots=True)
class _Node:
    """A fed token; row `row` of `step` has the scores of the next token. `token` is None until it is read.

    `fork`: the position of the last token on the path to it that the caller chose, not the tree.
    """

    parent: int
    token: int | None
    column: int
    step: Step
    row: int
    fork: int
    children: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TreeInput:
    """Tokens that are being fed to a tree: their columns, how they are scored, and their forks (see `_Node`)."""

    parents: Sequence[int]
    ids: Sequence[int | None]
    new: NewRows
    metadata: SamplingMetadata
    forks: Sequence[int]


class Tree:
    """One request's tree. Implements `drafters.drafter.TokenTree`, whose docstrings are the contract."""

    def __init__(
        self,
        kv_rows: KVRows,
        sampler: Sampler,
        context_length: int,
        draws: Draws | None = None,
        cache: PromptCache | None = None,
    ) -> None:
        """With `draws` a node's continuation is drawn, else it is the best token. Tokens in `cache` are not read
        again."""
        self.kv_rows, self._sampler, self._context_length = kv_rows, sampler, context_length
        self._draws, self.draws = draws, draws is not None
        self._origin = 0  # the position of the first column's token; earlier tokens have no column
        self._committed: list[int] = []
        self._layout = TreeLayout(0)
        self._recent: list[int] = []  # committed columns that are still in the window
        self._nodes: dict[int, _Node] = {}
        self.next_node, self.root = 0, 0
        self._cache = cache if cache is not None else PromptCache(KvCost())

    @property
    def committed_len(self) -> int:
        return len(self._committed)

    @property
    def room(self) -> int:
        return max(0, self._context_length - len(self._committed))

    @property
    def _columns(self) -> int:
        """The number of committed tokens that have columns, from position `_origin` on."""
        return self._layout.prefix + len(self._recent)

    def child(self, node: int, token: int, given: bool | None = None) -> int | None:
        parent = self._node(node)
        for child in parent.children:
            entry = self._nodes[child]
            fits = given is None or (entry.fork != parent.fork) == given
            if fits and self._token(entry) == token and not self.kv_rows.is_stale(entry.column):
                return child
        return None

    def feed(self, parents: Sequence[int], tokens: Sequence[int | None]) -> list[int]:
        """Feeds this tree alone, as `feed_together` does."""
        (nodes,) = self.feed_together([self], [TreeFeed(parents, tokens)])
        return nodes

    @staticmethod
    def feed_together(trees: Sequence[Tree], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        """Feeds each tree its tokens, in one forward if the KV rows can; returns the nodes of each tree.

        All trees are of one model. A call that fails leaves all trees unchanged.
        """
        begun: list[TreeInput] = []
        try:
            for tree, feed in zip(trees, feeds, strict=True):
                begun.append(tree.begin(feed))
            kv_rows = [tree.kv_rows for tree in trees]
            logits = type(kv_rows[0]).forward(kv_rows, [growth.new for growth in begun])
            steps = _score_trees(trees, begun, logits)
        except Exception:
            for tree, growth in zip(trees, begun, strict=False):
                tree._layout.end = growth.new.start  # frees the columns
            raise
        return [tree.end(growth, own) for tree, growth, own in zip(trees, begun, steps, strict=True)]

    def best(self, nodes: Sequence[int]) -> list[int]:
        self._evaluate_steps(nodes)
        return [self._best(self._node(node)) for node in nodes]

    def candidates(self, nodes: Sequence[int], count: int) -> list[list[Candidate]]:
        by_node: dict[int, list[Candidate]] = {}
        for step in self._evaluate_steps(nodes):
            own = [node for node in nodes if self._nodes[node].step is step]
            by_node.update(zip(own, step.candidates([self._nodes[n].row for n in own], count), strict=True))
        return [by_node[node] for node in nodes]

    def drawn_from(self, nodes: Sequence[int]) -> SparseQ | None:
        rows = [(node.step, node.row) for node in map(self._node, nodes)]
        qs = [step.q(row) for step, row in rows if isinstance(step, DrawnStep)]
        return SparseQ(np.concatenate([q.ids for q in qs]), np.concatenate([q.probs for q in qs])) if qs else None

    def scores(self, node: int) -> mx.array:
        """Returns the scores [V] of the tokens after a node."""
        return self._node(node).step.row(self._nodes[node].row)

    def read(self, tokens: Sequence[int]) -> int:
        if not self._committed and (cached := self._restore_cached(tokens)):
            return cached
        self._compact()
        start = len(self._committed)
        count = self.kv_rows.prefill(tokens[:-1], start)
        self._committed += tokens[:count]
        self._layout, self._nodes = TreeLayout(start + count), {}
        if count < len(tokens) - 1:
            return count
        self._feed_root(tokens[-1])
        return len(tokens)

    def read_all(self, tokens: Sequence[int]) -> None:
        """Reads `tokens`, piece by piece."""
        while tokens:
            tokens = tokens[self.read(tokens) :]

    def _restore_cached(self, tokens: Sequence[int]) -> int:
        """Begins with the part of a text of these tokens that is in the prompt cache; returns its length."""
        start = self._cache.find(tokens)
        if start is not None:
            self.kv_rows.restore(start)
            self._layout = TreeLayout(start.length)
            self._committed += tokens[: start.length]
        self._cache.enter(self, min(len(tokens) + self._sampler.params.max_tokens, self._context_length))
        return start.length if start is not None else 0

    def add_features(self, position: int, rows: Halves) -> None:
        """Does nothing: only trees of heads read features."""

    def can_read(self, count: int) -> bool:
        return count > 0

    def can_grow(self) -> bool:
        return bool(self._nodes)

    def commit(self, path: Sequence[int]) -> None:
        for node in path:
            if self._node(node).parent != self.root:
                raise InvalidRequest(f"node {node} can't be committed: it does not follow node {self.root}")
            self._commit_node(node)
        if path:
            self._prune()

    def shareable_tokens(self) -> list[int]:
        """Returns the committed tokens in the prefix; see `PrefixSource`."""
        return [] if self.kv_rows.has_extra_state else self._committed[: self._layout.prefix]

    def save(self, length: int) -> SavedPrefix:
        """Returns a copy of the first `length` columns; see `PrefixSource`."""
        return self.kv_rows.save(length)

    def close(self, discard: bool = False) -> None:
        self._cache.leave(self)
        if not discard:
            self._cache.store(self._committed, self._copy)
        self._nodes.clear()
        self.kv_rows.close()

    def _copy(self, length: int) -> SavedPrefix:
        self._compact()
        return self.kv_rows.save(length)

    def _compact(self) -> None:
        """Keeps only the committed columns."""
        if self._layout.end > self._layout.prefix:
            self.kv_rows.keep(self._layout.prefix, self._layout.compact(self._recent, []))
        self._recent = []

    def _feed_root(self, token: int) -> None:
        """Commits the token after the committed columns, which becomes the root."""
        self._commit_node(self.feed([ROOT], [token])[0])

    def _node(self, node: int) -> _Node:
        if node not in self._nodes:
            raise InvalidRequest(f"node {node} is not in the tree; expected one that was fed and not dropped")
        return self._nodes[node]

    def _evaluate_steps(self, nodes: Sequence[int]) -> list[Step]:
        """Returns the steps of these nodes; a chain of lazy ones is evaluated at once, not step by step."""
        steps = list({id(step): step for step in (self._node(node).step for node in nodes)}.values())
        unread = [step.pending for step in steps if not step.is_read]
        if len(unread) > 1:
            mx.eval(unread)
        return steps

    def _best(self, node: _Node) -> int:
        return node.step.best()[node.row]

    def _token(self, node: _Node) -> int:
        if node.token is None:
            node.token = self._best(self._nodes[node.parent])
        return node.token

    def begin(self, feed: TreeFeed) -> TreeInput:
        """Assigns a column to each token; returns what the forward and its scores need of this tree."""
        start = self._layout.end
        above = [self._column_of(parent) for parent in feed.parents]
        ids = [self._known_token(parent, token) for parent, token in zip(feed.parents, feed.tokens, strict=True)]
        histories = self._histories(feed.parents, ids) if self._sampler.needs_history else None
        known = [token for token in ids if token is not None]
        tokens = known if len(known) == len(ids) else self._lazy_tokens(feed.parents, ids)
        self._layout.add(above)
        positions = self._layout.positions
        places = (positions[start:] + self._origin).tolist()
        fed = zip(feed.parents, feed.tokens, places, strict=True)
        forks = [self._nodes[parent].fork if token is None else place for parent, token, place in fed]
        new = NewRows(tokens, start, positions, self._layout.seen(start), above)
        return TreeInput(
            feed.parents, ids, new, SamplingMetadata(self._sampler, [place + 1 for place in places], histories), forks
        )

    @property
    def kind(self) -> Hashable:
        """Trees of the same kind are scored together; a tree with draws is scored alone."""
        return self._sampler.kind if self._draws is None else id(self)

    def score_rows(self, begun: Sequence[TreeInput], logits: mx.array) -> list[tuple[Step, int]]:
        """Returns the step of each token, and its row there, by these logits [R, V] of trees of this kind."""
        if self._draws is None:
            step = make_step([growth.metadata for growth in begun], logits)
        else:
            step = self._draws.make_step(begun[0].metadata, logits, begun[0].forks)
        return [(step, row) for row in range(logits.shape[0])]

    def end(self, growth: TreeInput, steps: Sequence[tuple[Step, int]]) -> list[int]:
        """Adds the fed nodes, whose scores are these rows of these steps, and returns them."""
        first = self.next_node
        for index, (parent, token) in enumerate(zip(growth.parents, growth.ids, strict=True)):
            column = growth.new.start + index
            self._nodes[first + index] = _Node(parent, token, column, *steps[index], growth.forks[index])
            if parent >= 0:
                self._nodes[parent].children.append(first + index)
        self.next_node += len(growth.ids)
        return list(range(first, self.next_node))

    def _column_of(self, parent: int) -> int:
        """Returns the column of a node, even before it has been fed; for ROOT that of the last committed token."""
        if parent >= self.next_node:
            return self._layout.end + parent - self.next_node
        return self._columns - 1 if parent == ROOT else self._node(parent).column

    def _known_token(self, parent: int, token: int | None) -> int | None:
        """Returns the token to feed, or None if it is not known without waiting."""
        if token is not None:
            return token
        node = self._node(parent)
        return self._best(node) if node.step.is_read or not self.kv_rows.lazy else None

    def _lazy_tokens(self, parents: Sequence[int], ids: Sequence[int | None]) -> mx.array:
        """Returns the tokens to feed, [R]; those not yet read stay on the device."""
        known = [token for token in ids if token is not None]
        pool, begins, end = [mx.array(known, mx.int32)] if known else [], dict[int, int](), len(known)
        picks, places = [], iter(range(end))
        for parent, token in zip(parents, ids, strict=True):
            if token is not None:
                picks.append(next(places))
                continue
            node = self._nodes[parent]
            if id(node.step) not in begins:
                pool.append(node.step.chosen())
                begins[id(node.step)], end = end, end + pool[-1].shape[0]
            picks.append(begins[id(node.step)] + node.row)
        joined = pool[0] if len(pool) == 1 else mx.concatenate(pool)
        return joined if picks == list(range(end)) else joined[mx.array(picks)]

    def _histories(self, parents: Sequence[int], ids: list[int | None]) -> list[list[int]]:
        """Returns the history of each row, for penalties and grammars; lazy tokens are read into `ids`."""
        first = self.next_node
        tails: list[list[int]] = []
        for row, parent in enumerate(parents):
            token = ids[row]
            if token is None:
                token = ids[row] = self._best(self._nodes[parent])
            above = tails[parent - first] if parent >= first else self._path(parent)
            tails.append([*above, token])
        reach = self._sampler.reach
        return [(self._committed[-reach:] + tail)[-reach:] for tail in tails]

    def _path(self, node: int) -> list[int]:
        """Returns the uncommitted tokens down to `node`."""
        path: list[int] = []
        while node in self._nodes and node != self.root:
            path.append(self._token(self._nodes[node]))
            node = self._nodes[node].parent
        return path[::-1]

    def _commit_node(self, node: int) -> None:
        """Commits one node."""
        entry = self._nodes[node]
        self._committed.append(self._token(entry))
        self._recent.append(entry.column)
        self.root = node

    def _prune(self) -> None:
        """Drops all nodes but the root and its descendants; gathers the columns once enough are unused."""
        kept, todo = {}, [self.root]
        while todo:
            node = todo.pop()
            kept[node] = self._nodes[node]
            todo += kept[node].children
        self._nodes = dict(sorted(kept.items()))
        pending = [node for key, node in self._nodes.items() if key != self.root]
        dead = self._layout.end - self._layout.prefix - len(self._recent) - len(pending)
        if dead <= self.kv_rows.max_unused_columns and len(self._recent) < _INITIAL_WINDOW_COLUMNS:
            return
        prefix = self._layout.prefix
        self.kv_rows.keep(prefix, self._layout.compact(self._recent, [node.column for node in pending]))
        self._nodes[self.root].column = prefix + len(self._recent) - 1
        for column, survivor in enumerate(pending, prefix + len(self._recent)):
            survivor.column = column
        self._recent = []


def _score_trees(trees: Sequence[Tree], begun: Sequence[TreeInput], logits: mx.array) -> list[list[tuple[Step, int]]]:
    """Returns the step of each tree's tokens, and their rows there. Trees of the same kind share a step."""
    ends = np.cumsum([len(growth.ids) for growth in begun]).tolist()
    begins = [0, *ends[:-1]]
    groups: dict[Hashable, list[int]] = {}
    for index, tree in enumerate(trees):
        groups.setdefault(tree.kind if len(trees) > 1 else None, []).append(index)
    by_tree: dict[int, list[tuple[Step, int]]] = {}
    for members in groups.values():
        rows = [logits[begins[i] : ends[i]] for i in members] if len(groups) > 1 else [logits]
        joined = rows[0] if len(rows) == 1 else mx.concatenate(rows)
        steps = iter(trees[members[0]].score_rows([begun[i] for i in members], joined))
        by_tree.update((i, list(islice(steps, len(begun[i].ids)))) for i in members)
    return [by_tree[index] for index in range(len(trees))]
