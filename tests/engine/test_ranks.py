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

from outrider.engine.hidden_states import HiddenStateReader, HiddenStates
from outrider.engine.kv_cache import Feed
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.engine.prompt_cache import SavedPrefix
from outrider.engine.ranks import MirroredKVCache, RankFollower, Ranks
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ModelError, OutriderError
from outrider.protocol.messages import Message


class FakeCollective:
    """Stands in for the collective between two ranks. Both run in one process and have the whole model."""

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


class TwoRanks:
    """Rank 0 and a follower, which receives rank 0's messages through the codec."""

    def __init__(self, path: Path) -> None:
        collective: Any = FakeCollective()
        self.model = replace(load(path), cpu=None)  # ranks share forwards by MLX only
        self.theirs = open_kv_cache(replace(load(path), cpu=None))
        self.follower = RankFollower(self.theirs, collective)
        self.texts = MirroredKVCache(open_kv_cache(self.model), collective, self._send)
        self._sent: list[Message] = []

    def _send(self, *messages: Message) -> None:
        self._sent += decode_all(encode_all(messages))

    def forward(self, feeds: list[Feed]) -> None:
        try:
            self.texts.forward(feeds)
        finally:
            for message in self._sent:
                self.follower.apply(message)  # type: ignore[arg-type]
            self._sent.clear()

    def adopt(self, text: Any, saved: SavedPrefix) -> None:
        self.texts.adopt(text, saved)

    def check(self) -> None:
        """Checks that both ranks' caches are equal."""
        own, theirs = (arrays(kv_cache.state()) for kv_cache in (self.texts, self.theirs))
        assert len(own) == len(theirs)
        assert all(a.shape == b.shape and mx.array_equal(a, b) for a, b in zip(own, theirs, strict=True))


def arrays(state: Any) -> list[mx.array]:
    if isinstance(state, list | tuple):
        return [array for part in state for array in arrays(part)]
    return [state] if isinstance(state, mx.array) else []


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5"])
def test_cache_of_a_follower_equals_that_of_rank_0(tiny_model: Callable[..., Path], family: str) -> None:
    """Texts are opened, fed together, marked, rolled back, saved, begun from copies and closed.

    Some tokens are not evaluated before they are fed.
    """
    ranks, draws = TwoRanks(tiny_model(family)), random.Random(1)
    sequences, copies = [ranks.texts.open()], list[Any]()
    for step in range(16):
        if len(sequences) < 4 and draws.random() < 0.4:
            sequences.append(ranks.texts.open())
            if copies and draws.random() < 0.5:
                ranks.adopt(sequences[-1], draws.choice(copies))
        if len(sequences) > 1 and draws.random() < 0.2:
            ranks.texts.close(sequences.pop(draws.randrange(len(sequences))))
        sequence = draws.choice(sequences)
        if sequence.length > 3 and draws.random() < 0.4:
            try:
                sequence.roll_back(sequence.length - draws.randint(1, 3))
            except OutriderError:  # nothing so early was marked
                ranks.texts.close(sequences.pop(sequences.index(sequence)))
                sequences.append(ranks.texts.open())
        if sequence in sequences and sequence.length and draws.random() < 0.3:
            copies.append(ranks.texts.save(sequence, sequence.length))
        del copies[: -2 if draws.random() < 0.3 else -9]
        feeds = []
        for one in draws.sample(sequences, draws.randint(1, len(sequences))):
            one.mark()
            tokens = [draws.randrange(2, 250) for _ in range(draws.randint(1, 5))]
            feeds.append(Feed(one, tokens, len(tokens)))
        if step % 5 == 0:
            feeds[0] = Feed(feeds[0].sequence, mx.array([7], mx.int32), 1)
        ranks.forward(feeds)
        ranks.check()
    copies.clear()
    ranks.forward([Feed(sequences[0], [9], 1)])
    assert not ranks.follower._copies


def test_copy_that_fails_on_rank_0_is_not_made_by_followers(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 would never tell the followers to drop it."""
    ranks = TwoRanks(tiny_model("llama"))
    sequence = ranks.texts.open()
    ranks.forward([Feed(sequence, [5, 6, 7], 3)])
    with monkeypatch.context() as broken, pytest.raises(ModelError):
        broken.setattr(ranks.texts._own, "save", Mock(side_effect=ModelError("out of memory")))
        ranks.texts.save(sequence, 3)
    ranks.forward([Feed(sequence, [9], 1)])
    assert not ranks.follower._copies


def test_hidden_rows_are_read_on_rank_0_only(tiny_model: Callable[..., Path]) -> None:
    ranks, rows = TwoRanks(tiny_model("llama")), list[mx.array]()
    ranks.texts.tap_hidden_states(HiddenStates(ranks.model.model, HiddenStateReader((1,))))
    ranks.forward([Feed(ranks.texts.open(), [5, 6, 7], 1, hidden=rows.append)])
    ranks.check()
    assert [r.shape for r in rows] == [(3, 64)] and mx.isfinite(rows[0]).all()


def test_follower_survives_a_forward_that_fails_on_rank_0(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = TwoRanks(tiny_model("llama"))
    sequence = ranks.texts.open()
    ranks.forward([Feed(sequence, [5, 6, 7], 3)])
    with monkeypatch.context() as broken, pytest.raises(ValueError):
        broken.setattr(llama.MLP, "__call__", lambda self, x: mx.zeros((2, 3)) @ x)
        ranks.forward([Feed(sequence, [8], 1)])
    sequence.roll_back(3)
    ranks.forward([Feed(sequence, [8], 1)])
    ranks.check()


class GroupOfSize:
    """Rank 0 of a distributed group of this size, without the other ranks."""

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
