"""The ranks of a sharded model: MLX's collective, and a KV cache that all ranks share, each with its part.

Tensor parallelism: each rank has a part of every layer, and a layer's output is a sum over ranks. So all ranks run the
same forwards in the same order over the same texts. Rank 0 chooses tokens and sends each forward and each change to the
others; a token that is not read yet reaches them through the collective. Each forward is started at once and as a
whole: if one rank computed it later, or never, the ranks would be out of step. Knows arrays, models and KV caches;
knows nothing of sockets.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import finalize

import mlx.core as mx
import mlx.nn as nn

from outrider.engine.cache import FlatSequence
from outrider.engine.kv_cache import Feed, ModelRows
from outrider.engine.prompt_cache import SavedPrefix
from outrider.protocol.errors import (
    InvalidRequest,
    ModelError,
    OutriderError,
    WorkerError,
    first_line,
    wrap_model_errors,
)
from outrider.protocol.messages import TextChange, TextFeed, TextForward
from outrider.protocol.stats import KvCost

log = logging.getLogger(__name__)

_BROADCAST_BYTES = 512  # the size of every broadcast


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of one model; this process is `rank` of `size`."""

    group: mx.distributed.Group

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    def share_array(self, array: mx.array) -> mx.array:
        """Returns rank 0's array; the others pass zeros of its shape. Lazy."""
        return mx.distributed.all_sum(array, group=self.group)

    def broadcast(self, words: bytes) -> bytes:
        """Returns rank 0's `words` on all ranks, through the collective. Waits for all ranks."""
        padded = mx.array(list(words.ljust(_BROADCAST_BYTES, b"\0")), mx.int32)
        received = self.share_array(padded if self.rank == 0 else mx.zeros_like(padded))
        return bytes(map(int, received.tolist())).rstrip(b"\0")  # type: ignore[arg-type]

    def shard_model(self, model: nn.Module, model_type: str) -> None:
        """Reduces the model, whose weights may still be in their files, to this rank's part.

        Raises:
            ModelError: mlx-lm can't shard such a model, or not over this number of ranks.
        """
        if not hasattr(model, "shard"):
            raise ModelError(f"mlx-lm can't shard a {model_type} model; use another model, or a single rank")
        try:
            model.shard(self.group)
        except Exception as error:
            raise ModelError(
                f"this {model_type} model can't be sharded over {self.size} ranks ({first_line(error)}); expected a"
                " number that divides its heads and its widths"
            ) from error


def join() -> Ranks:
    """Joins the collective, and waits for all its ranks.

    Raises:
        InvalidRequest: there is only one rank.
        WorkerError: the other ranks can't be reached.
    """
    try:
        ranks = Ranks(mx.distributed.init())
    except RuntimeError as error:
        raise WorkerError(f"the other ranks can't be reached ({first_line(error)}); restart all ranks") from error
    if ranks.size == 1:
        raise InvalidRequest("this target has only one rank; start two or more with mlx.launch, or leave out --shard")
    return ranks


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SharedCopy(SavedPrefix):
    """Rank 0's part of copy `number`; each rank has its own. `local_ranks`: the number of ranks on this machine."""

    number: int = 0
    local_ranks: int = 1

    @property
    def cost(self) -> KvCost:
        """Its memory on this machine."""
        own = SavedPrefix(self.length, self.layers, self.states).cost
        return KvCost(self.local_ranks * own.per_text, self.local_ranks * own.per_token)


class MirroredSequence:
    """Rank 0's part of text `number`."""

    def __init__(self, own: FlatSequence, number: int, send: Callable[[TextChange], None]) -> None:
        self.own, self.number, self._send_change = own, number, send
        self.exact, self.has_free_marks = own.exact, own.has_free_marks

    @property
    def length(self) -> int:
        return self.own.length

    def mark(self) -> None:
        if not self.exact:
            self._send_change(TextChange("mark", self.number))
        self.own.mark()

    def roll_back(self, length: int) -> None:
        if length < self.length:
            self._send_change(TextChange("roll back", self.number, length))
        self.own.roll_back(length)


class MirroredKVCache:
    """Rank 0's side: its own KV cache, and `send`, which sends to the other ranks. `local_ranks`: see `SharedCopy`.

    Changes are sent together with the next forward, since only forwards are urgent. Trees are not fed, because only
    lengths are sent, and not paths through a tree. Hidden states are this rank's, which are the same on all ranks.
    """

    trees = False

    def __init__(self, own: ModelRows, ranks: Ranks, send: Callable[..., None], local_ranks: int = 1) -> None:
        self._own, self._ranks, self._send, self._local_ranks = own, ranks, send, local_ranks
        self.together, self.is_lazy = own.together, own.is_lazy
        self.state, self.tap_hidden_states = own.state, own.tap_hidden_states
        self._numbers, self._copies = itertools.count(), itertools.count(1)
        self._pending_changes: list[TextChange] = []
        self._dropped: deque[int] = deque()  # a copy may be dropped at any moment, on any thread

    def open(self) -> MirroredSequence:
        sequence = MirroredSequence(self._own.open(), next(self._numbers), self._pending_changes.append)
        self._pending_changes.append(TextChange("open", sequence.number))
        return sequence

    def close(self, sequence: MirroredSequence) -> None:
        self._pending_changes.append(TextChange("close", sequence.number))
        self._own.close(sequence.own)

    def save(self, sequence: MirroredSequence, length: int) -> SavedPrefix:
        number = next(self._copies)
        own = self._own.save(sequence.own, length)
        self._pending_changes.append(TextChange("save", sequence.number, length, number))
        copy = SharedCopy(own.length, own.layers, own.states, number, self._local_ranks)
        finalize(copy, self._dropped.append, number).atexit = False
        return copy

    def adopt(self, sequence: MirroredSequence, start: SavedPrefix) -> None:
        number = start.number if isinstance(start, SharedCopy) else 0
        self._pending_changes.append(TextChange("adopt", sequence.number, start.length, number))
        self._own.adopt(sequence.own, start)

    def forward(self, feeds: Sequence[Feed]) -> mx.array:
        while self._dropped:
            self._pending_changes.append(TextChange("drop", copy=self._dropped.popleft()))
        self._send(*self._pending_changes, TextForward(tuple(map(_make_text_feed, feeds))))
        self._pending_changes.clear()
        return _start_forward(self._own, [replace(f, sequence=f.sequence.own, tokens=self._tokens(f)) for f in feeds])

    def _tokens(self, feed: Feed) -> Sequence[int] | mx.array:
        tokens = feed.tokens
        return self._ranks.share_array(tokens.astype(mx.int32)) if isinstance(tokens, mx.array) else tokens


class RankFollower:
    """Another rank's side: repeats rank 0's operations on its own KV cache."""

    def __init__(self, own: ModelRows, ranks: Ranks) -> None:
        self._own, self._ranks = own, ranks
        self._sequences: dict[int, Any] = {}
        self._copies: dict[int, SavedPrefix] = {}

    def apply(self, message: TextForward | TextChange) -> None:
        """Starts the same forward, or applies the same change. If it fails, it fails on rank 0, too."""
        try:
            if isinstance(message, TextForward):
                feeds = [self._feed(feed) for feed in message.feeds]
                with wrap_model_errors("a rank's forward"):
                    _start_forward(self._own, feeds)
            else:
                self._change(message)
        except OutriderError as error:
            log.warning("%s; see rank 0's log for the request", error)

    def _change(self, change: TextChange) -> None:
        match change.operation:
            case "open":
                self._sequences[change.text] = self._own.open()
            case "close":
                self._own.close(self._sequences.pop(change.text))
            case "mark":
                self._sequences[change.text].mark()
            case "roll back":
                self._sequences[change.text].roll_back(change.length)
            case "save":
                self._copies[change.copy] = self._own.save(self._sequences[change.text], change.length)
            case "adopt":
                self._own.adopt(self._sequences[change.text], self._copies[change.copy].cut(change.length))
            case "drop":
                self._copies.pop(change.copy, None)

    def _feed(self, feed: TextFeed) -> Feed:
        tokens = feed.tokens or self._ranks.share_array(mx.zeros(feed.count, mx.int32))
        return Feed(self._sequences[feed.text], tokens, feed.num_logits, feed.prompt)


def _make_text_feed(feed: Feed) -> TextFeed:
    tokens = () if isinstance(feed.tokens, mx.array) else tuple(feed.tokens)
    return TextFeed(feed.sequence.number, tokens, feed.count, feed.num_logits, feed.prompt)


def _start_forward(kv_cache: ModelRows, feeds: Sequence[Feed]) -> mx.array:
    logits = kv_cache.forward(feeds)
    mx.async_eval(logits, kv_cache.state())  # type: ignore[no-untyped-call]
    return logits
