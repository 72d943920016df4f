"""The token trees of heads, fed with the target's features: in the target's process and in a draft worker alike.

A chain is a tree of one branch: its tokens are read with their true features when they are committed, and all nodes are
dropped (`HeadTree.read_in_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafters.growth import Steps
from outrider.drafters.heads.kv_rows import BlockKVRows, BlockSlot, MaskedKVRows, PairKVRows, gather, opened_blocks
from outrider.drafters.heads.layers import LINK_CANDIDATES, BlockLink
from outrider.drafters.heads.pair_kv_cache import DraftBlock, FeatureBuffer, SavedPairs
from outrider.engine.kv_rows import NewRows
from outrider.engine.prompt_cache import SavedPrefix
from outrider.engine.sampling import Sampler, SamplingMetadata
from outrider.engine.steps import CandidateStep, Step, make_step
from outrider.engine.tree import Tree, TreeInput, TreeLayout
from outrider.protocol.trees import ROOT, TreeFeed


class HeadTree(Tree):
    """One request's tree."""

    kv_rows: Any

    @property
    def pairs(self) -> range:
        """The positions of the features that it has read of committed text; empty if some are missing in between."""
        return range(0)

    def can_read(self, count: int) -> bool:
        return self._arrived(count) > 0

    def _arrived(self, count: int) -> int:
        """Returns how many of the next `count` tokens have the features that they are fed with."""
        features: FeatureBuffer = self.kv_rows.features
        return max(0, min(features.end + 1 - len(self._committed), count))

    def read(self, tokens: Sequence[int]) -> int:
        count = self._arrived(len(tokens))
        self.append(tokens[:count] if count < len(tokens) else tokens[:-1])
        if count == len(tokens):
            self._feed_root(tokens[-1])
        return count

    def read_in_steps(self, tokens: Sequence[int], depth: int = 1) -> Steps[int]:
        """The generator form of `read`: yields the root's feed, is sent the root's node, and returns it."""
        self.append(tokens[:-1])
        (root,) = yield self, TreeFeed([ROOT], tokens[-1:], [depth])
        self._commit_node(root)
        return root

    def append(self, tokens: Sequence[int]) -> None:
        """Commits `tokens` and gives each a column; there is no root until a later call reads the rest."""
        self._compact()
        self._committed += tokens
        self._nodes, self._layout = {}, TreeLayout(len(self._committed))

    def shareable_tokens(self) -> list[int]:
        return self._committed[: self.pairs.stop + 1] if self.pairs and self.pairs.start == 0 else []

    def close(self, discard: bool = False) -> None:
        super().close(discard or not self.pairs)

    def add_features(self, position: int, rows: np.ndarray[Any, Any]) -> None:
        """Adds the features [N, W] of tokens from `position` on."""
        self.kv_rows.add_features(position, rows)


class PairTree(HeadTree):
    """A tree of pairs. Committed tokens before the first pair have no column.

    A feature that is not known yet is replaced by a guess. When the true one arrives, nodes fed with the guess become
    stale, and committed tokens are fed again.
    """

    kv_rows: PairKVRows

    @property
    def pairs(self) -> range:
        return range(self._origin - 1, self._origin - 1 + self._columns)

    def adopt(self, tokens: Sequence[int], saved: SavedPairs, end: int) -> None:
        """Begins with the saved pairs of `tokens` before position `end`."""
        self._origin, self._committed = saved.begin + 1, list(tokens[: end + 1])
        self.kv_rows.restart_at(self._origin)
        self.kv_rows.kv_cache.adopt(self.kv_rows.sequence, SavedPrefix(end - saved.begin, saved.layers))
        self._layout = TreeLayout(end - saved.begin)

    def _arrived(self, count: int) -> int:
        features, last = self.kv_rows.features, len(self._committed) + count - 1
        return super()._arrived(count) if features.begin < min(features.end, last) else 0

    def append(self, tokens: Sequence[int]) -> None:
        """Commits and reads `tokens`, from the first one after features on. After a gap in the features, such as those
        of a prompt from the cache, reading begins anew."""
        features, start, columns = self.kv_rows.features, len(self._committed), self._columns
        super().append(tokens)
        if not columns or features.begin > start - 1:
            self._origin = features.begin + 1
            self.kv_rows.restart_at(self._origin)
        self._layout = TreeLayout(len(self._committed) - self._origin)
        first = max(start, self._origin)
        self.kv_rows.prefill(self._committed[first:], first - self._origin)
        features.forget(len(self._committed) - 1)

    def _commit_node(self, node: int) -> None:
        super()._commit_node(node)
        self.kv_rows.features.forget(len(self._committed) - 1)


class SlotTree(HeadTree):
    """A tree of blocks, whose slots have the scores after nodes."""

    def begin(self, feed: TreeFeed) -> TreeInput:
        """Also chooses the slot after each token: the next one of its parent's block, or the first of its own."""
        first, depths = self.next_node, list[int | None](feed.depths) or [None] * len(feed.tokens)
        slots: list[BlockSlot] = []
        for index, (parent, token) in enumerate(zip(feed.parents, feed.tokens, strict=True)):
            continues_block = token is None and parent < first
            following = self.kv_rows.next_slot(self._node(parent).column) if continues_block else None
            slots.append(following or BlockSlot(self._block(self._pending_path(feed, index), depths[index])))
        growth = super().begin(feed)
        return replace(growth, new=replace(growth.new, slots=slots))

    def _block(self, path: list[int], depth: int | None) -> DraftBlock:
        """Returns the block that the last token of a pending path opens, with `depth` slots if there is room."""
        raise NotImplementedError

    def _pending_path(self, feed: TreeFeed, index: int) -> list[int]:
        """Returns the pending tokens down to this token of the feed. Waits for tokens that were not read yet."""
        parent, token = feed.parents[index], feed.tokens[index]
        above = self._path(parent) if parent < self.next_node else self._pending_path(feed, parent - self.next_node)
        return [*above, self._best(self._node(parent)) if token is None else token]

    def score_rows(self, begun: Sequence[TreeInput], logits: mx.array) -> list[tuple[Step, int]]:
        """All slots of a block are scored when it is opened, unless penalties or a grammar make scores depend on the
        tokens before."""
        new = [growth.new for growth in begun]
        if self._sampler.needs_history:
            found = super().score_rows(begun, logits)
        else:
            _score_blocks([(own.metadata.sampler, block) for own in begun for block in opened_blocks(own.new)])
            blocks = [(slot.block, slot.index) for rows in new for slot in rows.slots]
            found = [(block.step, block.first + index) for block, index in blocks]
        link: BlockLink | None = self.kv_rows.link
        return found if link is None else self._rescore_by_link(link, new, found)

    def _rescore_by_link(
        self, link: BlockLink, new: Sequence[NewRows], steps: Sequence[tuple[Step, int]]
    ) -> list[tuple[Step, int]]:
        """Rescores the best candidates of each slot by the token before it."""
        slots = [slot for rows in new for slot in rows.slots]
        before, vectors = [rows.lazy_tokens() for rows in new], [(s.block.hidden, s.block.row + s.index) for s in slots]
        few = {id(step): step.top_scores(LINK_CANDIDATES) for step, _ in steps}
        tokens = gather([(few[id(step)][0], row) for step, row in steps])
        scores = gather([(few[id(step)][1], row) for step, row in steps])
        last, temp = before[0] if len(before) == 1 else mx.concatenate(before), self._sampler.params.temp
        gains = link(last, gather(vectors), tokens)
        step = CandidateStep(tokens, scores + gains / (temp or 1.0), self._sampler.vocab_size)
        return [(step, row) for row in range(len(slots))]


def _score_blocks(blocks: Sequence[tuple[Sampler, DraftBlock]]) -> None:
    """Scores all slots of these blocks."""
    if not blocks:
        return
    metadata = [
        SamplingMetadata(sampler, range(block.position + 1, block.position + 1 + block.slots))
        for sampler, block in blocks
    ]
    rows = [(block.logits, row) for _, block in blocks for row in range(block.row, block.row + block.slots)]
    step, first = make_step(metadata, gather(rows)), 0
    for _, block in blocks:
        block.step, block.first, first = step, first, first + block.slots


class MaskedTree(SlotTree, PairTree):
    """Pairs, and one block of masks after the committed ones."""

    kv_rows: MaskedKVRows

    def _block(self, path: list[int], depth: int | None) -> DraftBlock:
        return DraftBlock(len(self._committed) + len(path) - 1, path[-1:], depth or 1)


class BlockTree(SlotTree):
    """A tree of blocks over features. Every committed token has a column; only their features are read.

    Each outcome opens a block of its own: the tokens since the last feature, the bonus token, then masks. The tokens
    after the block's own choice are in the block already. The number of a block's slots is limited, and so is the
    tree's `room`.
    """

    kv_rows: BlockKVRows

    @property
    def pairs(self) -> range:
        positions = self.kv_rows.feature_positions
        is_contiguous = len(positions) and len(positions) == positions[-1] + 1 - positions[0]
        return range(int(positions[0]), int(positions[-1]) + 1) if is_contiguous else range(0)

    def adopt(self, tokens: Sequence[int], saved: SavedPairs, end: int) -> None:
        """Begins with the saved features of `tokens` before position `end`."""
        self._committed = list(tokens[:end])
        self.kv_rows.kv_cache.adopt(self.kv_rows.sequence, SavedPrefix(end - saved.begin, saved.layers))
        self.kv_rows.feature_positions = np.arange(saved.begin, end, dtype=np.int32)
        self._layout = TreeLayout(end)

    @property
    def room(self) -> int:
        return max(0, min(super().room, self.kv_rows.max_draft_tokens(len(self._committed) - 1)))

    def child(self, node: int, token: int, given: bool | None = None) -> int | None:
        """Returns the node of a block's own choice (`given` False), or else of a token that opened a block of its own.
        Neither is returned once its features have arrived."""
        return super().child(node, token, given is not False)

    def _block(self, path: list[int], depth: int | None) -> DraftBlock:
        last = len(self._committed) + len(path) - 1
        anchor = self.kv_rows.anchor(last)
        pending, most = anchor - len(self._committed), self.kv_rows.depth - (last - anchor)
        tokens = path[pending:] if pending > 0 else [*self._committed[anchor:], *path]
        return DraftBlock(anchor, tokens, max(1, min(most if depth is None else depth, most)))
