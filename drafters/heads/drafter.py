"""A head as a drafter: its token trees, which it opens in a draft worker or drafts with in the target's process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx
from mlx.utils import tree_flatten

from outrider.drafters.drafter import Drafter, TokenTree
from outrider.drafters.growth import MAX_CHILDREN, ChainAlternatives, Continuation, Steps
from outrider.drafters.heads.head import BlockHead, Head
from outrider.drafters.heads.kv_rows import MAX_PENDING_PAIRS, BlockKVRows, MaskedKVRows, PairKVRows
from outrider.drafters.heads.pair_kv_cache import (
    MAX_BUFFERED,
    FeatureBuffer,
    FeatureKVCache,
    HeadKVCache,
    PairKVCache,
    SavedPairs,
)
from outrider.drafters.heads.trees import BlockTree, HeadTree, MaskedTree, PairTree
from outrider.drafters.work_ahead import DraftTurn
from outrider.engine.ort.forward import OrtForward
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.messages import InProcess
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import TreeFeed

log = logging.getLogger(__name__)

_MAX_REREAD_TOKENS = 16  # cached tokens that the target reads again, so that the head can continue its own prefix


class HeadDrafter(Drafter):
    """A `Drafter` with `head`, and a drafter in the target's process."""

    def __init__(
        self, head: Head, vocab_size: int, cpu: OrtForward | None = None, backend: str = "", features: str = ""
    ) -> None:
        """`vocab_size`: the target's. `cpu` computes the head's forwards; None: MLX does."""
        self.head, self.backend, self.features = head, backend, features
        self.vocab_size, self.context_length, self.weight_bytes = vocab_size, head.context_length, head.weight_bytes
        self.parameters = sum(value.size for _, value in tree_flatten(head.parameters()))
        pair_bytes = head.bytes_per_pair if cpu is None else 2 * sum(keys.nbytes for keys in cpu.columns)
        self.prompt_cache = PromptCache(KvCost(0, pair_bytes))
        self.kv_cache: HeadKVCache = FeatureKVCache(head) if isinstance(head, BlockHead) else PairKVCache(head, cpu)

    def make_tree(self, sampler: Sampler, draws: Draws | None) -> TokenTree:
        """Returns a tree that reads tokens when their features have arrived, and can grow once the first ones have."""
        return self.tree(sampler, FeatureBuffer(self.context_length))

    def open_draft(self, sampling: SamplingParams, constraint: Constraint | None = None) -> HeadDraft:
        """Returns the draft of a text in the target's process, which collects the text's features."""
        return HeadDraft(self, self.sampler(sampling, constraint))

    def tree(
        self, sampler: Sampler, features: FeatureBuffer, cache: PromptCache | None = None, masks: bool = False
    ) -> PairTree | BlockTree:
        """Returns a tree. `masks`: it only drafts after its committed text, by a block of masks if the head has one."""
        kv_cache, size = self.kv_cache, self.context_length
        if isinstance(kv_cache, FeatureKVCache):
            return BlockTree(BlockKVRows(kv_cache, features), sampler, size, cache=cache)
        if masks and self.head.depth is not None:
            return MaskedTree(MaskedKVRows(kv_cache, features), sampler, size, cache=cache)
        return PairTree(PairKVRows(kv_cache, features), sampler, size, cache=cache)


class HeadDraft:
    """The features of one text, and the tree that drafts after its committed tokens, a chain as a tree of one branch.

    The target's slot reports the features of committed tokens as they are computed; they are read when a draft is first
    requested, so plain decoding only costs their storage. Only the newest of many are kept. If some are missing, the
    head sees less of the text. For a prompt in the target's prompt cache, the head uses its own prompt cache, or begins
    after it. After each verify the head reads the true pairs of the accepted tokens; drafted pairs are dropped. Tokens
    are chosen by the target's own contract (`engine.sampling`), with its noise and its vocabulary.
    """

    def __init__(self, drafter: HeadDrafter, sampler: Sampler) -> None:
        self.features = FeatureBuffer(drafter.head.reach or MAX_BUFFERED)  # those that are not read
        self._drafter, self._sampler = drafter, sampler
        self._tree: HeadTree | None = None
        self._start: tuple[SavedPairs, int] | None = None  # what it begins with: the saved pairs before a position
        self._tokens: Sequence[int] = ()
        self._length = 0
        self._proposed: ChainAlternatives | None = None
        self._closed = False

    def begin(self, tokens: Sequence[int], length: int, exact: bool) -> int:
        """Returns the position from which the target should report features; it has the first `length` tokens cached.

        `exact`: the target can drop some of them and read them again.
        """
        cached = self._drafter.prompt_cache.find(tokens)
        if cached is None or not isinstance(cached, SavedPairs):
            return length
        count = min(cached.length - 1, length)
        if count <= cached.begin or count < length - (_MAX_REREAD_TOKENS if exact else 0):
            return length
        self.features.begin = self.features.end = count
        self._start = cached, count
        return count

    def add_features(self, position: int, features: mx.array) -> None:
        """Adds the features [R, W] of committed tokens from `position` on. After a gap, reading starts again."""
        begin = self.features.begin
        if not self._closed:
            self.features.add(position, features)
        if self.features.begin != begin:
            self._start = None

    def turn(self, tokens: Sequence[int], task: InProcess) -> DraftTurn:
        """Returns the turn in which `task` is drafted after the committed `tokens`, which extend those of the last
        call. Nothing is drafted if features are missing."""
        new = tokens[self._length :]
        if self._proposed is not None and new:
            self._proposed.update_calibration(self._drafter.calibration, new)
        self._proposed, self._tokens, self._length = None, tokens, len(tokens)
        depth = self._limit_depth(task.depth)
        is_behind = depth > 0 and self.features.count > MAX_PENDING_PAIRS + 1
        return DraftTurn(self._draft(depth, task.min_prob), self._read_pairs if is_behind else None)

    def _read_pairs(self) -> bool:
        """Reads the pairs before the last one, so that they do not count as drafting."""
        self.tree.append(self._tokens[self.tree.committed_len : self._length - 1])
        return True

    @property
    def tree(self) -> HeadTree:
        """The tree in which it drafts; opened when it is first needed."""
        if self._tree is None:
            cache, most = self._drafter.prompt_cache, self._length + self._sampler.params.max_tokens
            self._tree = tree = self._drafter.tree(self._sampler, self.features, cache=cache, masks=True)
            cache.enter(tree, min(most, self._drafter.context_length))
            if self._start is not None:
                tree.adopt(self._tokens, *self._start)
        return self._tree

    @property
    def is_up_to_date(self) -> bool:
        """Whether it has the features of all committed tokens but the last, and some of them are not read."""
        return self.features.end == self._length - 1 and self.features.count > 0

    def _limit_depth(self, depth: int) -> int:
        """Returns how many of `depth` tokens it can draft; 0: none, as features are missing or it is closed."""
        if self._closed or not self.is_up_to_date:
            return 0
        most = self._drafter.head.depth or depth
        return max(0, min(depth, most, self._drafter.context_length - self._length))

    def _draft(self, depth: int, min_prob: float) -> Steps[Continuation]:
        """Returns `depth` tokens after the committed text, chained on the device and evaluated once. With a `min_prob`
        below 1 they have alternatives with a greater probability than that."""
        if not depth:
            return Continuation()
        tree = self.tree
        nodes = [(yield from tree.read_in_steps(self._tokens[tree.committed_len : self._length], depth))]
        for remaining in range(depth - 1, 0, -1):
            nodes += yield tree, TreeFeed(nodes[-1:], [None], [remaining])
        chain = tuple(tree.best(nodes))
        if min_prob < 1.0:
            self._proposed = ChainAlternatives.of(chain, tree.candidates(nodes, MAX_CHILDREN))
            return self._proposed.tree(self._drafter.calibration, min_prob)
        return Continuation(chain)

    def close(self, discard: bool) -> None:
        """Ignores further features, and frees the text in the KV cache. Its pairs may serve later texts.
        `discard`: keep nothing, after a failure."""
        tree, self._tree, self._closed = self._tree, None, True
        if tree is not None:
            try:
                with wrap_model_errors("storing the head's state"):
                    tree.close(discard or not self._read_all(tree))
            except OutriderError as error:
                log.warning("%s; the head will read it again", error)
                tree.close(discard=True)
        self.features.forget(self.features.end)

    def _read_all(self, tree: HeadTree) -> bool:
        """Reads the pairs of all committed tokens; returns whether they are worth keeping."""
        count = self.features.end + 1
        if count > len(self._tokens) or not self._drafter.prompt_cache.wants(self._tokens):
            return False
        tree.append(self._tokens[tree.committed_len : count])
        return True
