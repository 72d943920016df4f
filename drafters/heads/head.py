"""The interface of a head, a drafter that reads the target's hidden states.

A head is fed *pairs*: the *feature* of a token (computed from the target's hidden row there) and the next token. From a
pair it computes a hidden vector, and from that the logits of the token after it. It keeps pairs as keys and values. It
knows nothing of texts, sampling or requests.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.drafters.heads.checkpoint import HeadTarget
from outrider.drafters.heads.layers import BlockLink, DraftVocabulary
from outrider.engine.flat import FlatCache
from outrider.engine.hidden_states import Point
from outrider.engine.ort.layers import DecoderLayers
from outrider.protocol.errors import ModelError


class HeadModule(nn.Module):  # type: ignore[misc]
    """Shapes: T pairs, R rows, W the width of features, H that of the head, V the target's vocabulary.

    `points`: where the target is tapped. `reach`: the number of newest pairs that the draft depends on; None: all.
    `depth`: how many tokens it drafts at once, with masks in the places of unknown ones; None: one after another.
    A head with an embedding or an output layer of its own names it `embed_tokens` or `lm_head`; others use the
    target's, of which ranks have parts.
    """

    points: tuple[Point, ...]
    reach: int | None = None
    depth: int | None = None
    mask_token: int

    def __init__(self, target: HeadTarget, vocabulary: DraftVocabulary | None = None) -> None:
        """`vocabulary`: the tokens of its own output layer; None: those of the target."""
        super().__init__()
        self._embed, self._output, self.context_length = target.embed, target.output, target.context_length
        self.vocabulary = vocabulary or DraftVocabulary(target.vocab_size)

    @property
    def weight_bytes(self) -> int:
        return sum(value.nbytes for _, value in tree_flatten(self.parameters()))

    @property
    def dtype(self) -> mx.Dtype:
        """The number format in which it computes."""
        return next((value.dtype for _, value in tree_flatten(self.parameters())), mx.float32)

    @property
    def bytes_per_pair(self) -> int:
        """The size of a pair's keys and values."""
        attentions = [layer.self_attn for layer in self.layers]
        names = ("k_proj", "v_proj", "kv_a_proj_with_mqa")
        cached = [attention[name].weight for attention in attentions for name in names if name in attention]
        return sum(int(weight.shape[0]) * int(weight.dtype.size) for weight in cached)

    def decoder(self, target: DecoderLayers) -> DecoderLayers:
        """Returns the modules for ONNX Runtime, which return `next_features`'s vectors. `target`: the target's.

        Raises:
            ModelError: it can't compute heads of this kind.
        """
        raise ModelError(f"ONNX Runtime computes heads of kind mtp and eagle3; this is a {type(self).__name__}")

    def release(self) -> None:
        """Frees the weights that ONNX Runtime has copied; those that `fuse` needs stay."""
        for name in ("layers", "embed_tokens", "lm_head"):
            self.pop(name, None)
        for name in ("_embed", "_output"):  # the target's own
            self.__dict__.pop(name, None)
        mx.clear_cache()

    def fuse(self, rows: mx.array) -> mx.array:
        """Returns the features [R, W] of tapped rows [R, points * D], cheaply enough for the target's forward."""
        raise NotImplementedError

    def logits(self, hidden: mx.array) -> mx.array:
        """Returns the logits [R, V] of hidden vectors [R, H]; -inf for tokens that it does not know."""
        raise NotImplementedError


class PairHead(HeadModule):
    """Computes a hidden vector for each pair, and drafts one token after its last pair, and one after each pair of a
    mask if it has a `depth`. `together`: one forward may hold several texts."""

    together = True

    @property
    def mask_feature(self) -> mx.array | None:
        """The learned feature [1, W] of a mask, which also replaces any feature that is not known; None: the head
        continues with its own vector instead."""
        return None

    def __call__(self, tokens: mx.array, features: mx.array, caches: list[FlatCache]) -> mx.array:
        """Returns the hidden vectors [1, T, H] of pairs: tokens [1, T], features [1, T, W]."""
        raise NotImplementedError

    def next_features(self, hidden: mx.array) -> mx.array:
        """Returns the stand-ins [R, W] for the features of the tokens drafted by hidden vectors [R, H]."""
        return hidden


class LayersHead(PairHead):
    """A head of transformer `layers` with `_windows` (None: all pairs), then a `norm` and an output layer.

    `gives_normed`: stand-ins for features are normed. Each kind has a `build_input` for ONNX Runtime (`InputBuilder`).
    """

    gives_normed = True

    def logits(self, hidden: mx.array) -> mx.array:
        logits = self.get("lm_head", self._output)(self.norm(hidden))
        return self.vocabulary.spread(logits.astype(mx.float32))

    def next_features(self, hidden: mx.array) -> mx.array:
        normed: mx.array = self.norm(hidden) if self.gives_normed else hidden
        return normed

    def decoder(self, target: DecoderLayers) -> DecoderLayers:
        if "lm_head" in self:
            target = replace(target, output=self.lm_head, tokens=self.vocabulary.ids, vocab_size=self.vocabulary.size)
        table, begin, normed = self.get("embed_tokens", target.embedding), self.build_input, self.gives_normed
        own = replace(target, layers=self.layers, windows=self._windows, norm=self.norm, embedding=table)
        return replace(own, begin=begin, gives_normed=normed)


class BlockHead(HeadModule):
    """Reads features only. Drafts a block of masks after the last token, which follows the features of all tokens
    before it. The rows of a block all see each other.

    `from_anchor`: the block's first row, the last token's, drafts the first token; else the mask after it does.
    """

    depth: int
    from_anchor: bool

    @property
    def link(self) -> BlockLink | None:
        """The link that scores each token of a block by the one before it, if there is one."""
        return None

    def read(self, features: mx.array, caches: list[FlatCache]) -> None:
        """Adds features [1, T, W] to the caches."""
        raise NotImplementedError

    def block(self, tokens: mx.array, block_positions: mx.array, caches: list[FlatCache]) -> mx.array:
        """Returns the hidden vectors [1, T, H] of blocks: `tokens` [1, T] has the known tokens of each, then its masks,
        and `block_positions` [T] their positions in the block."""
        raise NotImplementedError


Head = PairHead | BlockHead
