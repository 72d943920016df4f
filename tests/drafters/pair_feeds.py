"""Feeds pairs of several texts to a head without trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from outrider.drafters.heads.pair_kv_cache import DraftBlock, FeatureKVCache, HeadKVCache, PairKVCache
from outrider.engine.cache import FlatSequence
from outrider.engine.flat import Segment


@dataclass(frozen=True, slots=True)
class PairFeed:
    """The next pairs of a text: tokens [N], each after the token of its feature [N, W]."""

    text: FlatSequence
    tokens: mx.array
    features: mx.array


def read(kv_cache: HeadKVCache, feeds: Sequence[PairFeed]) -> None:
    """Reads pairs or features without drafting after them."""
    if isinstance(kv_cache, PairKVCache):
        outputs(kv_cache, feeds, [1] * len(feeds))
        return
    kv_cache.read_features(mx.concatenate([feed.features for feed in feeds]), _segments(feeds))


def slots(kv_cache: HeadKVCache, feeds: Sequence[PairFeed], depths: Sequence[int]) -> tuple[mx.array, mx.array]:
    """The vectors and logits of `depths` tokens after each feed."""
    if isinstance(kv_cache, PairKVCache):
        return outputs(kv_cache, [_with_masks(kv_cache, f, n - 1) for f, n in zip(feeds, depths, strict=True)], depths)
    read(kv_cache, feeds)
    blocks = []
    for feed, depth in zip(feeds, depths, strict=True):
        end, last = feed.text.length, np.asarray(feed.tokens)[-1:].tolist()
        blocks.append((feed.text.row, np.arange(end, dtype=np.int32), [DraftBlock(end, last, depth)]))
    assert isinstance(kv_cache, FeatureKVCache)
    return kv_cache.open_blocks(blocks)


def outputs(kv_cache: PairKVCache, feeds: Sequence[PairFeed], counts: Sequence[int]) -> tuple[mx.array, mx.array]:
    """The vectors and logits of each feed's last `counts` pairs."""
    tokens, features = mx.concatenate([f.tokens for f in feeds]), mx.concatenate([f.features for f in feeds])
    ends = np.cumsum([feed.features.shape[0] for feed in feeds])
    wanted = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return kv_cache.feed(tokens, features, _segments(feeds), wanted)


def _segments(feeds: Sequence[PairFeed]) -> list[Segment]:
    segments = []
    for feed in feeds:
        count = int(feed.features.shape[0])
        segments.append(Segment(feed.text.row, feed.text.length, count, len(feeds) == 1))
        feed.text.length += count
    return segments


def _with_masks(kv_cache: PairKVCache, feed: PairFeed, count: int) -> PairFeed:
    mask = kv_cache.head.mask_feature
    if not count or mask is None:
        return feed
    tokens = mx.full((count,), kv_cache.head.mask_token, mx.int32)
    features = mx.repeat(mask, count, axis=0)
    return PairFeed(feed.text, mx.concatenate([feed.tokens, tokens]), mx.concatenate([feed.features, features]))
