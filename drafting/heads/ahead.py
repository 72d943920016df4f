"""A head in a process of its own: it works ahead like a draft model, fed with rows that the target tells it.

What it needs of the target's weights, as its embedding, is read from the target's files; nothing else of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from mlx.utils import tree_flatten

from outrider.drafting.drafter import TokenTree, TreeFeed
from outrider.drafting.heads.block_tree import BlockTree
from outrider.drafting.heads.head import BlockHead, GuessingHead
from outrider.drafting.heads.load import features_of, read
from outrider.drafting.heads.numpy_check import host_of
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.drafting.heads.tree import HeadTree
from outrider.drafting.heads.tree_check import agrees
from outrider.engine.loading import outline
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree, feed_together
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import CannotDraft
from outrider.protocol.kv import KvCost
from outrider.protocol.sampling import SamplingParams

UNTRAINED = (
    "this head was not trained for blocks whose first tokens are known (dflash_config's loss_type variable_prefix), as"
    " outcomes are: what it prepares holds less often than what it drafts; expected one that was, or head_in target"
)


class AheadHead:
    """A `HearingDrafter` with `head`. `features`: of what its rows are to be made."""

    def __init__(
        self,
        head: GuessingHead | BlockHead,
        backend: str,
        vocab_size: int,
        features: str = "",
        numpy: NumpyHead | None = None,
    ) -> None:
        """`vocab_size`: the target's. `numpy` makes the forwards of few pairs.

        Raises:
            CannotDraft: it has nothing to go on with where the target has not spoken yet.
        """
        self._numpy = numpy
        self.note = _doubt(head, backend)
        self.head, self.backend, self.features = head, backend, features
        self.vocab_size, self.context_length = vocab_size, head.context_length
        self.parameters = sum(value.size for _, value in tree_flatten(head.parameters()))  # type: ignore[union-attr]
        self.weight_bytes = head.weight_bytes
        self.prompt_cache = PromptCache(KvCost(0, head.bytes_per_pair))

    @classmethod
    def load(cls, kind: str, path: str, target: str, progress: Callable[[str], None]) -> AheadHead:
        """The head of this kind in a folder, for the target in another.

        Raises:
            CannotDraft: there is none, or it can't draft for this target.
        """
        model = outline(target, progress=progress)
        head = read(kind, path, model, progress)
        if not isinstance(head, GuessingHead | BlockHead):
            raise CannotDraft(f"{kind} heads can draft only in the target's process; use head_in target")
        numpy = host_of(head, model, agrees)
        return cls(head, kind, model.vocab_size, features_of(head, Path(path), Path(target)), numpy)

    def open(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        progress: Callable[[int, int], None] | None = None,
        constraint: Constraint | None = None,
    ) -> TokenTree:
        """A tree that reads `tokens` as it is told their rows."""
        sampler = Sampler(sampling, self.vocab_size, normalised=False, constraint=constraint)
        if isinstance(self.head, BlockHead):
            return BlockTree(self.head, sampler, tokens)
        return HeadTree(self.head, sampler, tokens, self._numpy)

    def feed_together(self, trees: Sequence[TokenTree], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        return feed_together(cast(Sequence[Tree], trees), feeds)


def _doubt(head: GuessingHead | BlockHead, backend: str) -> str:
    """What a person should know about such a head in a process of its own."""
    if not isinstance(head, BlockHead):
        return ""
    if head.link is not None and head.link.recalls:
        raise CannotDraft(
            f"this {backend} head's memory starts with each block, so it can't continue from an outcome inside one;"
            " use head_in target"
        )
    return "" if head.sees_prefixes else UNTRAINED
