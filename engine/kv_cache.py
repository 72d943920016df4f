"""What a target remembers of its texts, and the place that each request has among them.

`KVCache`: what a target remembers of all its texts, and one forward over many of them. `FlatKVCache` feeds them
together (`engine.flat`); `SeparateKVCache` one after the other, for models with state that has no columns. Both forget
what came after a length. Knows tokens and logits; nothing of requests or chains.

`CacheSlot`: a request's place in the target: its committed tokens, how it chooses the next, and what the model
remembers of them. Knows tokens; nothing of sockets, words or who proposes chains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.engine import hidden_states
from outrider.engine.abilities import abilities
from outrider.engine.cache import KVState
from outrider.engine.flat import FlatRows, Segment
from outrider.engine.hidden_states import FirstLayers, HiddenStates, Takes
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.flat import OrtFlat
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.engine.residual import target_sampler
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.sampling import SamplingParams


class CachedSequence(Protocol):
    """One text's place. `length` tokens have been fed. `exact`: it can be cut at every length, not only at marks."""

    length: int

    @property
    def exact(self) -> bool: ...

    @property
    def marks_freely(self) -> bool:
        """Whether a mark costs nothing, so that steps may be begun that might have to be forgotten."""
        ...

    def mark(self) -> None:
        """Makes the present length one that a rollback can return to."""
        ...

    def roll_back(self, length: int) -> None:
        """Forgets what came after the first `length` tokens, or after the last mark before them: see `self.length`.

        Raises:
            RollbackError: the model keeps state that can't be put back.
        """
        ...


@dataclass(frozen=True, slots=True)
class Feed:
    """The next tokens of a text, [N], maybe unread; the last `wanted` of them get logits. `prompt`: part of one.

    `hidden` takes their hidden rows, where the texts are tapped. With `parents` the last of the tokens are a tree of
    drafts (`protocol.trees`), for texts that take `trees`.
    """

    sequence: Any
    tokens: Sequence[int] | mx.array
    wanted: int
    prompt: bool = False
    hidden: Takes | None = None
    parents: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        return self.tokens.shape[0] if isinstance(self.tokens, mx.array) else len(self.tokens)


class KVCache(Protocol):
    """The texts of one model. `together`: a forward reads the weights once for all of its texts."""

    @property
    def together(self) -> bool: ...

    @property
    def trees(self) -> bool:
        """Whether feeds may be trees of drafts."""
        ...

    @property
    def is_lazy(self) -> bool:
        """Whether a forward's logits are made when they are waited for, and not by `forward` itself."""
        ...

    def open(self) -> CachedSequence:
        """A place for one more text, empty."""
        ...

    def close(self, text: Any) -> None:
        """Frees the place."""
        ...

    def save(self, text: Any, length: int) -> SavedPrefix:
        """A copy of what is remembered of a text's first tokens: of `length`, or where that can't be cut of fewer.

        Raises:
            RollbackError: the model keeps state that can't be cut, and nothing that early was marked.
        """
        ...

    def adopt(self, text: Any, start: CachedPrefix) -> None:
        """A text that is still empty begins with what another has left."""
        ...

    def tap_hidden_states(self, taps: HiddenStates) -> None:
        """From now on feeds may take hidden rows, by these taps of its model."""
        ...

    def forward(self, feeds: Sequence[Feed]) -> mx.array:
        """Feeds them all; the logits of what is wanted, feed after feed: [sum of wanted, V]. Lazy."""
        ...

    def state(self) -> list[Any]:
        """Everything to evaluate so that what was fed is remembered."""
        ...


class FlatKVCache(FlatRows):
    """All texts in one buffer a layer, a row each, those in use in front."""

    together = True

    def __init__(self, model: nn.Module, trees: bool = True, cpu: OrtFlat | None = None) -> None:
        """`cpu` makes the forwards in MLX's place."""
        super().__init__(model)
        self.trees, self._cpu, self.is_lazy = trees, cpu, cpu is None
        self._model, self._wanted = model, hidden_states.install(model)
        self._hidden_states: HiddenStates | None = None

    def tap_hidden_states(self, taps: HiddenStates) -> None:
        self._hidden_states = taps

    def forward(self, feeds: Sequence[Feed]) -> mx.array:
        order = sorted(range(len(feeds)), key=lambda i: (feeds[i].prompt, feeds[i].sequence.row))
        segments = [_segment(feeds[i]) for i in order]
        tokens = _joined([feeds[i].tokens for i in order])
        wanted = self._rows(feeds, order, segments)
        fed = [feeds[i] for i in order]
        if self._cpu is not None:
            logits = self._on_cpu(self._cpu, tokens, fed, segments, wanted)
        else:
            self._frame.begin(segments)
            logits = self._by_mlx(tokens, fed, wanted)
        for feed in feeds:
            feed.sequence.length += feed.count
        return logits

    def _on_cpu(
        self,
        cpu: OrtFlat,
        tokens: mx.array,
        feeds: Sequence[Feed],
        segments: Sequence[Segment],
        wanted: Sequence[int] | None,
    ) -> mx.array:
        listener = self._hidden_states if any(feed.hidden for feed in feeds) else None
        host = np.array(tokens)
        return _tapped(lambda: cpu.forward(host, segments, self._caches, wanted, listener), feeds, self._hidden_states)

    def _by_mlx(self, tokens: mx.array, feeds: Sequence[Feed], wanted: Sequence[int] | None) -> mx.array:
        rows = None if wanted is None else mx.array(list(wanted) or [0], mx.int32)
        self._wanted.rows, self._wanted.passed = rows, False
        try:
            logits = _forward(self._model, tokens, self._caches, feeds, self._hidden_states)
        finally:
            self._wanted.rows = None
        return logits if rows is None or self._wanted.passed else mx.take(logits, rows, axis=0)

    def first(self, layers: FirstLayers, feeds: Sequence[Feed]) -> mx.array:
        """Feeds them, in the order of their rows, to the model's first layers alone; the rows there, [T, D]. Lazy."""
        self._frame.begin([_segment(feed) for feed in feeds])
        tokens = _joined([feed.tokens for feed in feeds])
        rows = layers.rows(lambda: self._model(tokens[None], cache=self._caches))[0]
        for feed in feeds:
            feed.sequence.length += feed.count
        return rows

    def _rows(self, feeds: Sequence[Feed], order: Sequence[int], segments: Sequence[Segment]) -> list[int] | None:
        """Where the wanted logits stand in the flat row, feed after feed; None: all, as they stand."""
        if list(order) == list(range(len(feeds))) and all(feed.wanted == feed.count for feed in feeds):
            return None
        ends, end = {}, 0
        for index, segment in zip(order, segments, strict=True):
            end += segment.count
            ends[index] = end
        return [row for i, feed in enumerate(feeds) for row in range(ends[i] - feed.wanted, ends[i])]


class SeparateKVCache:
    """Texts one after the other, each with mlx-lm's own caches: for state that can't share a row."""

    together = False
    trees = False
    is_lazy = True

    def __init__(self, model: nn.Module, own_caches: bool = False) -> None:
        """`own_caches`: see `protocol.messages.Abilities`."""
        self._model, self._own_caches = model, own_caches
        self._sequences: list[KVState] = []
        self._hidden_states: HiddenStates | None = None

    def open(self) -> KVState:
        self._sequences.append(KVState(self._model, self._own_caches))
        return self._sequences[-1]

    def close(self, text: KVState) -> None:
        self._sequences.remove(text)

    def save(self, text: KVState, length: int) -> SavedPrefix:
        return text.save(length)

    def adopt(self, text: KVState, start: CachedPrefix) -> None:
        text.adopt(start)

    def tap_hidden_states(self, taps: HiddenStates) -> None:
        self._hidden_states = taps

    def forward(self, feeds: Sequence[Feed]) -> mx.array:
        parts = []
        for feed in feeds:
            logits = _forward(self._model, _joined([feed.tokens]), feed.sequence.caches, [feed], self._hidden_states)
            feed.sequence.length += feed.count
            if feed.wanted:
                parts.append(logits[-feed.wanted :])
        return parts[0] if len(parts) == 1 else mx.concatenate(parts) if parts else mx.zeros((0, 1))

    def state(self) -> list[Any]:
        return [text.state for text in self._sequences]


def _segment(feed: Feed) -> Segment:
    return Segment(feed.sequence.row, feed.sequence.length, feed.count, feed.prompt, parents=feed.parents)


def _forward(
    model: nn.Module, tokens: mx.array, caches: Any, feeds: Sequence[Feed], taps: HiddenStates | None
) -> mx.array:
    """The logits of one row of tokens, those of `feeds` in turn."""

    def call() -> mx.array:
        logits: mx.array = model(tokens[None], cache=caches)[0]
        return logits

    return _tapped(call, feeds, taps)


def _tapped(call: Callable[[], mx.array], feeds: Sequence[Feed], taps: HiddenStates | None) -> mx.array:
    """A forward's logits; what `feeds` take of hidden rows they get."""
    return call() if taps is None else taps.forward(call, [(feed.count, feed.hidden) for feed in feeds])


def _joined(parts: Sequence[Sequence[int] | mx.array]) -> mx.array:
    if not any(isinstance(part, mx.array) for part in parts):
        return mx.array([token for part in parts for token in part], mx.int32)
    arrays = [part if isinstance(part, mx.array) else mx.array(list(part), mx.int32) for part in parts]
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)


PREFILL = 512  # tokens a forward while a prompt is read

Listener = Callable[[int, mx.array], None]
"""Hears the hidden rows [R, W] of committed tokens, lazy or not, and the position of the first."""


class CacheSlot:
    """`tokens` are committed; the model has been fed the first `fed` of them, always fewer than all between calls.

    `listener` hears the hidden rows of what batches feed of them (`engine.verify`), where the texts are tapped;
    `begins_at` is asked which of so many remembered tokens are enough for it, since it hears of the others only.
    """

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: KVCache,
        tokens: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
    ) -> None:
        """`constraint`: what the text's grammar allows, if it has one.

        Raises:
            InvalidRequest: no tokens, or a token the model doesn't have.
        """
        if not tokens:
            raise InvalidRequest("the prompt has no tokens; expected at least one")
        if not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
            raise InvalidRequest(f"a prompt token is outside 0..{model.vocab_size - 1}, the model's vocabulary")
        self.tokens = list(tokens)
        self.sampler = target_sampler(params, model.vocab_size, constraint)
        self.kv_cache = kv_cache
        self.sequence: Any = kv_cache.open()
        self.listener: Listener | None = None
        self.begins_at: Callable[[int], int] | None = None

    @property
    def fed(self) -> int:
        return int(self.sequence.length)

    @property
    def unfed(self) -> list[int]:
        """The committed tokens the next forward must begin with; at least one."""
        return self.tokens[self.fed :]

    def forward(self, tokens: Sequence[int]) -> mx.array:
        """Feeds tokens behind what was fed; returns their logits [N, V]. Lazy."""
        return self.kv_cache.forward([Feed(self.sequence, tokens, len(tokens))])

    def feed_all_but(self, rest: int, progress: Callable[[int, int], None] | None = None) -> None:
        """Feeds committed tokens, evaluated, until only the last `rest` are unfed. `progress(done, total)` if long."""
        total = len(self.tokens) - rest
        long = total - self.fed > PREFILL
        while self.fed < total:
            self.kv_cache.forward(
                [Feed(self.sequence, self.tokens[self.fed : min(self.fed + PREFILL, total)], 0, True)]
            )
            mx.eval(self.kv_cache.state())
            mx.clear_cache()
            if long and progress is not None:
                progress(self.fed, len(self.tokens))

    def begin(self, start: CachedPrefix) -> None:
        """Has what another text has left of its first tokens, instead of reading them; fewer, where rows are wanted."""
        if self.begins_at is not None:
            start = replace(start, length=self.begins_at(start.length))
        self.kv_cache.adopt(self.sequence, start)

    def lendable(self) -> list[int]:
        """See `prompt_cache.Source`: none where the model's state can't be cut."""
        return self.tokens[: self.fed] if self.sequence.exact else []

    def save(self, length: int) -> SavedPrefix:
        """See `prompt_cache.Source`; of fewer tokens where the model's state can't be cut. Raises RollbackError."""
        return self.kv_cache.save(self.sequence, length)

    def close(self) -> None:
        """Gives its place back."""
        self.kv_cache.close(self.sequence)


def open_slots(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    progress: Callable[[int, int], None] | None = None,
    kv_cache: KVCache | None = None,
) -> list[CacheSlot]:
    """Makes a slot a prompt and feeds all of it but the last token, in chunks.

    Args:
        progress: called as (tokens done, tokens in all) after each chunk of a long prompt; may raise to end the call.
        texts: where they are held; None: each by itself.

    Raises:
        InvalidRequest: a prompt is empty or has tokens outside the vocabulary.
    """
    held = kv_cache or SeparateKVCache(model.model, abilities(model).own_caches)
    slots = [CacheSlot(model, held, prompt, chosen) for prompt, chosen in zip(prompts, params, strict=True)]
    for slot in slots:
        slot.feed_all_but(1, progress)
    return slots
