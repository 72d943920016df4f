"""All ranks repeat rank 0's operations on texts, so that their caches are equal."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import pytest
from mlx_lm.models import llama

from outrider.engine.hidden_states import HiddenStatePoints, HiddenStates
from outrider.engine.kv_cache import Feed
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.engine.prompt_cache import CachedPrefix, SavedPrefix
from outrider.engine.ranks import MirroredKVCache, RankFollower, Ranks
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ModelError, OutriderError
from outrider.protocol.messages import Message, TextForward


class Wire:
    """Two ranks in one process, each with a whole model: what a collective would carry lies here."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.unread: list[mx.array] = []

    def share_array(self, array: mx.array) -> mx.array:
        if not self.unread:
            self.unread.append(array)
            return array
        sent = self.unread.pop()
        assert sent.shape == array.shape and not array.any().item()
        return sent


class Two:
    """Rank 0's texts and a follower of them, which hears what the codec makes of rank 0's words."""

    def __init__(self, path: Path) -> None:
        wire: Any = Wire()
        self.model = replace(load(path), cpu=None)  # what ranks share is MLX's
        self.theirs = open_kv_cache(replace(load(path), cpu=None))
        self.follower = RankFollower(self.theirs, wire)
        self.texts = MirroredKVCache(open_kv_cache(self.model), wire, self._hear)
        self._heard: list[Message] = []

    def _hear(self, *messages: Message) -> None:
        self._heard += decode_all(encode_all(messages))

    def forward(self, feeds: list[Feed]) -> None:
        try:
            self.texts.forward(feeds)
        finally:
            for message in self._heard:
                if isinstance(message, TextForward):
                    self.follower.forward(message)
                else:
                    self.follower.change(message)  # type: ignore[arg-type]
            self._heard.clear()

    def adopt(self, text: Any, saved: SavedPrefix) -> None:
        self.texts.adopt(text, CachedPrefix(saved, saved.length))

    def check(self) -> None:
        """The same numbers at all places."""
        own, theirs = (arrays(kv_cache.state()) for kv_cache in (self.texts, self.theirs))
        assert len(own) == len(theirs)
        assert all(a.shape == b.shape and mx.array_equal(a, b) for a, b in zip(own, theirs, strict=True))


def arrays(state: Any) -> list[mx.array]:
    if isinstance(state, list | tuple):
        return [array for part in state for array in arrays(part)]
    return [state] if isinstance(state, mx.array) else []


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_cache_of_a_follower_equals_that_of_rank_0(tiny_model: Callable[..., Path], family: str) -> None:
    """Texts come and go, are fed together, marked, cut, copied into others and dropped; some tokens are unread."""
    two, draws = Two(tiny_model(family)), random.Random(1)
    lines, copies = [two.texts.open()], list[Any]()
    for step in range(16):
        if len(lines) < 4 and draws.random() < 0.4:
            lines.append(two.texts.open())
            if copies and draws.random() < 0.5:
                two.adopt(lines[-1], draws.choice(copies))
        if len(lines) > 1 and draws.random() < 0.2:
            two.texts.close(lines.pop(draws.randrange(len(lines))))
        line = draws.choice(lines)
        if line.length > 3 and draws.random() < 0.4:
            try:
                line.roll_back(line.length - draws.randint(1, 3))
            except OutriderError:  # nothing so early was marked
                two.texts.close(lines.pop(lines.index(line)))
                lines.append(two.texts.open())
        if line in lines and line.length and draws.random() < 0.3:
            copies.append(two.texts.save(line, line.length))
        del copies[: -2 if draws.random() < 0.3 else -9]
        feeds = []
        for one in draws.sample(lines, draws.randint(1, len(lines))):
            one.mark()
            tokens = [draws.randrange(2, 250) for _ in range(draws.randint(1, 5))]
            feeds.append(Feed(one, tokens, len(tokens)))
        if step % 5 == 0:
            feeds[0] = Feed(feeds[0].sequence, mx.array([7], mx.int32), 1)
        two.forward(feeds)
        two.check()
    copies.clear()
    two.forward([Feed(lines[0], [9], 1)])
    assert not two.follower._copies


def test_copy_that_fails_on_rank_0_is_made_nowhere(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would never drop it."""
    two = Two(tiny_model("llama"))
    sequence = two.texts.open()
    two.forward([Feed(sequence, [5, 6, 7], 3)])
    with monkeypatch.context() as broken, pytest.raises(ModelError):
        broken.setattr(two.texts._own, "save", Mock(side_effect=ModelError("out of memory")))
        two.texts.save(sequence, 3)
    two.forward([Feed(sequence, [9], 1)])
    assert not two.follower._copies


def test_hidden_rows_are_read_on_rank_0_only(tiny_model: Callable[..., Path]) -> None:
    two, rows = Two(tiny_model("llama")), list[mx.array]()
    two.texts.tap_hidden_states(HiddenStates(two.model.model, HiddenStatePoints((1,))))
    two.forward([Feed(two.texts.open(), [5, 6, 7], 1, hidden=rows.append)])
    two.check()
    assert [r.shape for r in rows] == [(3, 64)] and mx.isfinite(rows[0]).all()


def test_follower_survives_a_forward_that_fails_on_rank_0(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tiny_model("llama"))
    sequence = two.texts.open()
    two.forward([Feed(sequence, [5, 6, 7], 3)])
    with monkeypatch.context() as broken, pytest.raises(ValueError):
        broken.setattr(llama.MLP, "__call__", lambda self, x: mx.zeros((2, 3)) @ x)
        two.forward([Feed(sequence, [8], 1)])
    sequence.roll_back(3)
    two.forward([Feed(sequence, [8], 1)])
    two.check()


class GroupOfSize:
    """A place in a group of so many ranks that nobody else is in."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("family", "size", "why"),
    [
        ("gemma2", 2, "mlx-lm can't shard a gemma2 model"),
        ("llama", 3, "this llama model can't be sharded over 3 ranks"),
    ],
)
def test_model_that_cannot_be_sharded_is_refused(
    loaded: Callable[..., LoadedModel], family: str, size: int, why: str
) -> None:
    with pytest.raises(ModelError, match=why):
        Ranks(GroupOfSize(size)).shard_model(loaded(family).model, family)  # type: ignore[arg-type]
