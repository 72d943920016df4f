"""The KV cache of a target: all its texts, and one forward over many of them.

Knows tokens, logits and arrays; knows nothing of messages, text or drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from outrider.engine import hidden_states
from outrider.engine.cache import FlatRows, FlatSequence, flatten_caches, replace_caches
from outrider.engine.flat import LayerKVs, NodeSegment, Segment
from outrider.engine.hidden_states import FirstLayers, HiddenStates, HiddenStatesCallback, LogitsIndices
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.forward import OrtForward
from outrider.engine.prompt_cache import SavedPrefix
from outrider.engine.residual import make_target_sampler
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest, ProtocolError
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Bytes, Logprobs

if TYPE_CHECKING:
    from outrider.engine.ranks import MirroredKVCache

Tokens = Sequence[int] | mx.array
"""Tokens of a text, [N]; an array may still be lazy."""

PREFILL_CHUNK_TOKENS = 512  # the most tokens of a prompt in one forward

HiddenStatesListener = Callable[..., None]
"""A callback that receives the position of the first of some committed tokens, and their hidden states [R, W] for each
reader."""


@dataclass(frozen=True, slots=True)
class Feed:
    """The next tokens of a text, [N]; the last `num_logits` of them get logits. `prompt`: a piece of a prompt.

    `hidden` takes their hidden states, if `tap_hidden_states` was called. With `parents` the last tokens are a tree of
    drafts (`protocol.trees`), which the KV cache must support (`trees`). `all_cores`: no drafter works for the text, so
    a forward of such texts may use the drafters' core.
    """

    sequence: Any
    tokens: Tokens
    num_logits: int
    prompt: bool = False
    hidden: HiddenStatesCallback | None = None
    parents: tuple[int, ...] = ()
    all_cores: bool = False

    @property
    def count(self) -> int:
        return self.tokens.shape[0] if isinstance(self.tokens, mx.array) else len(self.tokens)


class ModelRows(FlatRows):
    """The rows of a model's texts, or of its trees, and forwards over them. `trees`: feeds may be trees of drafts."""

    trees = False

    def __init__(self, model: nn.Module, cpu: OrtForward | None = None, own_caches: bool = False) -> None:
        """`cpu`: computes the forwards instead of MLX. For the others see `FlatRows`."""
        super().__init__(model, cpu is None, own_caches)
        self.model, self.cpu = model, cpu
        self._lm_head_indices = LogitsIndices()
        self._hidden_states: HiddenStates | None = None

    def tap_hidden_states(self, taps: HiddenStates) -> None:
        """Allows feeds to take hidden states."""
        self._hidden_states = taps

    def run(
        self,
        tokens: Sequence[Tokens],
        segments: Sequence[Segment],
        logits_indices: Sequence[int] | None = None,
        all_cores: bool = False,
    ) -> mx.array:
        """Feeds the tokens of each segment, short segments first.

        Args:
            logits_indices: the tokens of the flat row that get logits; None: all.
            all_cores: see `Feed`.

        Returns:
            The logits [R, V]. Lazy, unless ONNX Runtime computes.
        """
        if self.cpu is None:
            return self._forward_mlx(tokens, segments, logits_indices)
        flat = np.concatenate([np.array(part, np.int32) for part in tokens])
        indices = np.arange(len(flat)) if logits_indices is None else np.array(logits_indices, np.int64)
        hidden = self._hidden_states
        tapped = hidden.tapped_layers if hidden is not None else []
        results = self.cpu(flat, segments, self._layers, indices, tapped, all_cores)
        if hidden is not None:
            for layer in tapped:
                hidden.record_layer_rows(layer, results[f"layer{layer}"])
        return mx.array(results["logits"])

    def _forward_mlx(
        self, tokens: Sequence[Tokens], segments: Sequence[Segment], logits_indices: Sequence[int] | None
    ) -> mx.array:
        self._frame.begin(segments)
        rows = None if logits_indices is None else mx.array(list(logits_indices) or [0], mx.int32)
        self._lm_head_indices.rows, self._lm_head_indices.passed = rows, False
        try:
            logits: mx.array = self.model(_join_tokens(tokens)[None], cache=self._caches)[0]
        finally:
            self._lm_head_indices.rows = None
        return logits if rows is None or self._lm_head_indices.passed else mx.take(logits, rows, axis=0)

    def forward(self, feeds: Sequence[Feed]) -> mx.array:
        """Feeds all texts. Returns the logits, feed after feed: [sum of num_logits, V]. Lazy."""
        order = sorted(range(len(feeds)), key=lambda i: (feeds[i].prompt, feeds[i].sequence.row))
        fed = [feeds[i] for i in order]
        segments = [_segment(feed) for feed in fed]
        indices = self._logits_indices(feeds, order, segments)
        wide, hidden = all(feed.all_cores or feed.prompt for feed in fed), self._hidden_states
        call = partial(self.run, [feed.tokens for feed in fed], segments, indices, wide)
        logits = call() if hidden is None else hidden.forward(call, [(feed.count, feed.hidden) for feed in fed])
        for feed in fed:
            feed.sequence.length += feed.count
        return logits

    def _logits_indices(
        self, feeds: Sequence[Feed], order: Sequence[int], segments: Sequence[Segment]
    ) -> list[int] | None:
        """Returns the indices of `Feed.num_logits` in the flat row, feed after feed; None: all, in this order."""
        if list(order) == list(range(len(feeds))) and all(feed.num_logits == feed.count for feed in feeds):
            return None
        ends = dict(zip(order, accumulate(segment.count for segment in segments), strict=True))
        return [row for i, feed in enumerate(feeds) for row in range(ends[i] - feed.num_logits, ends[i])]


class FlatKVCache(ModelRows):
    """All texts in one buffer for each layer, one row each."""

    def __init__(self, model: nn.Module, trees: bool = True, cpu: OrtForward | None = None) -> None:
        """`cpu`: computes the forwards instead of MLX."""
        super().__init__(model, cpu)
        self._lm_head_indices, self.trees = hidden_states.install_lm_head(model), trees

    def first(self, layers: FirstLayers, feeds: Sequence[Feed]) -> mx.array:
        """Feeds texts, in the order of their rows, to the model's first layers; returns hidden states [T, D]. Lazy."""
        tokens, segments = [feed.tokens for feed in feeds], [_segment(feed) for feed in feeds]
        rows = layers.rows(lambda: self._forward_mlx(tokens, segments, None))[0]
        for feed in feeds:
            feed.sequence.length += feed.count
        return rows


class SeparateKVCache(ModelRows):
    """Feeds texts one after another, with caches of their own for state that can't share a row."""

    together = False

    def __init__(self, model: nn.Module, own_caches: bool = False) -> None:
        """`own_caches`: use the model's own caches only, for a model that can't verify chains with others."""
        super().__init__(model, own_caches=own_caches)

    def _sequence(self, row: int) -> FlatSequence:
        flat, made = iter(self._layers), make_prompt_cache(self.model)
        own = [replace_caches(cache, lambda leaf: next(flat) if self._is_flat(leaf) else leaf) for cache in made]
        return FlatSequence(row, self, self._layers, own)

    def forward(self, feeds: Sequence[Feed]) -> mx.array:
        parts = []
        for feed in feeds:
            self._caches = feed.sequence.caches
            logits = super().forward([feed])
            if feed.num_logits:
                parts.append(logits)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts) if parts else mx.zeros((0, 1))

    def state(self) -> list[Any]:
        leaves = (leaf for text in self._sequences for leaf in text.leaves)
        return [cache.state for cache in (*self._layers, *leaves)]


KVCache: TypeAlias = "FlatKVCache | SeparateKVCache | MirroredKVCache"
"""All texts of one model."""


def _segment(feed: Feed) -> Segment:
    row, start = feed.sequence.row, feed.sequence.length
    if feed.parents:
        return NodeSegment.of(row, start, feed.count, feed.parents)
    return Segment(row, start, feed.count, feed.prompt)


def _join_tokens(parts: Sequence[Tokens]) -> mx.array:
    if not any(isinstance(part, mx.array) for part in parts):
        return mx.array([token for part in parts for token in part], mx.int32)
    arrays = [part if isinstance(part, mx.array) else mx.array(list(part), mx.int32) for part in parts]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The order in which `pack` puts keys and values of a piece of a text into bytes, from which another process with
    the same model continues: layer after layer, keys before values. Nothing is rounded.

    `tensors`: each one's shape for one token and its number format, [1, heads, 1, width].
    """

    tensors: tuple[mx.array, ...]

    @classmethod
    def of(cls, model: nn.Module, cpu: OrtForward | None = None) -> KVLayout:
        """Returns the layout of a model whose caches hold only keys and values; computes nothing.

        `cpu`: computes its forwards, in a number format of its own.
        """
        if cpu is not None:
            return cls(tuple(column for column in cpu.columns for _ in range(2)))
        caches: list[Any] = make_prompt_cache(model)
        model(mx.zeros((1, 1), mx.int32), cache=caches)
        arrays = [array for cache in caches for leaf in flatten_caches(cache) for array in (leaf.keys, leaf.values)]
        return cls(tuple(mx.zeros((1, a.shape[1], 1, a.shape[3]), a.dtype) for a in arrays))

    @property
    def bytes_per_token(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def pack(self, layers: LayerKVs) -> Bytes:
        """Packs keys and values of a piece, [1, heads, n, width] each, in the order of the layers."""
        arrays = (array for pair in layers for array in pair)
        typed = [array.astype(tensor.dtype) for array, tensor in zip(arrays, self.tensors, strict=True)]
        return np.concatenate([np.array(mx.contiguous(a).view(mx.uint8), copy=False).reshape(-1) for a in typed])

    def unpack(self, data: Bytes, count: int) -> LayerKVs:
        """Unpacks keys and values of `count` tokens. Raises ProtocolError if their size is wrong."""
        if data.size != count * self.bytes_per_token:
            raise ProtocolError(
                f"keys and values of {count} tokens have {data.size} bytes; expected {self.bytes_per_token} for each"
                " token: run the same model on both sides"
            )
        arrays, end = [], 0
        for tensor in self.tensors:
            start, end = end, end + count * tensor.nbytes
            arrays.append(mx.array(data[start:end].reshape(1, tensor.shape[1], count, -1)).view(tensor.dtype))
        return tuple(zip(arrays[::2], arrays[1::2], strict=True))


def check_prompt(tokens: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest if there are no tokens, or one is not in the vocabulary."""
    if not tokens:
        raise InvalidRequest("the prompt has no tokens; expected at least one")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise InvalidRequest(f"a prompt token is out of range; expected 0 to {vocab_size - 1} for this model")


class CacheSlot:
    """One request: its committed `tokens`, the first `fed` of which have been fed, its sampler, and its sequence in the
    KV cache. Between calls at least one token is unfed.

    `prompt_logprobs`: those that the request asks for, by the position of the first token that was fed for them.
    `listener` is called with the hidden states of committed tokens that `engine.verify` feeds. It gets none of cached
    tokens, so `usable_cached_tokens(length)` returns how many of `length` to use. `all_cores`: see `Feed`.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: KVCache,
        tokens: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
    ) -> None:
        """`constraint`: the text's grammar, if it has one.

        Raises:
            InvalidRequest: there are no tokens, or one is not in the vocabulary.
        """
        check_prompt(tokens, model.vocab_size)
        self.tokens = list(tokens)
        self.sampler = make_target_sampler(params, model.vocab_size, constraint)
        self.kv_cache = kv_cache
        self.sequence: Any = kv_cache.open()
        self.listener: HiddenStatesListener | None = None
        self.usable_cached_tokens: Callable[[int], int] | None = None
        self.all_cores = False
        self.prompt_logprobs: dict[int, Logprobs] = {}

    @property
    def fed(self) -> int:
        return int(self.sequence.length)

    @property
    def unfed(self) -> list[int]:
        """The committed tokens with which the next forward begins; at least one."""
        return self.tokens[self.fed :]

    def forward(self, tokens: Sequence[int]) -> mx.array:
        """Feeds tokens; returns their logits [N, V]. Lazy."""
        return self.kv_cache.forward([Feed(self.sequence, tokens, len(tokens))])

    def feed_all_but_last(self) -> None:
        """Feeds committed tokens, evaluated, until only the last one is unfed."""
        total = len(self.tokens) - 1
        while self.fed < total:
            self.kv_cache.forward(
                [Feed(self.sequence, self.tokens[self.fed : min(self.fed + PREFILL_CHUNK_TOKENS, total)], 0, True)]
            )
            mx.eval(self.kv_cache.state())
            mx.clear_cache()

    def begin(self, start: SavedPrefix) -> None:
        """Copies a saved prefix instead of reading it, or the part of it that `usable_cached_tokens` allows."""
        if self.usable_cached_tokens is not None:
            start = start.cut(self.usable_cached_tokens(start.length))
        self.kv_cache.adopt(self.sequence, start)

    def shareable_tokens(self) -> list[int]:
        """Returns the fed tokens, or none if the model's state can't be shortened; see `PrefixSource`."""
        return self.tokens[: self.fed] if self.sequence.exact else []

    def save(self, length: int) -> SavedPrefix:
        """Returns a copy of the state after `length` tokens, or fewer; see `FlatRows.save`."""
        return self.kv_cache.save(self.sequence, length)

    def close(self) -> None:
        """Removes the text from the KV cache."""
        self.kv_cache.close(self.sequence)
