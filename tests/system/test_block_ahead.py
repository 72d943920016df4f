"""A block head in the draft worker: outcomes are the first tokens of blocks, and the text is the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.drafter import TokenTree
from outrider.drafters.heads.dflash import DFlash
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.trees import BlockTree
from outrider.engine.loading import LoadedModel
from outrider.protocol.messages import Features, Message
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.system.cluster import MIXED, Cluster
from tests.system.links import VirtualClock
from tests.system.test_head_ahead import LENGTH, PROMPT, accepted, sampling
from tests.target_worker.block_heads import block_feature_head, block_head, block_token_head, gated_head

pytestmark = pytest.mark.usefixtures("counted_clock")

MakeHead = Callable[[LoadedModel], DFlash]


def make_head_cluster(target: LoadedModel, head: DFlash, kind: type[Cluster] = Cluster, **other: Any) -> Cluster:
    drafter = HeadDrafter(head, target.vocab_size)
    return kind(target, drafter, VirtualClock(), **{"ngrams": False, "full_depth": True, **other})


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_concurrent_requests_keep_the_targets_text(target: LoadedModel, mode: str) -> None:
    params = [sampling(temp, seed) for seed, temp in enumerate((0.0, 0.8, 0.8, 0.8))]
    simulated = make_head_cluster(target, gated_head(target), full_depth=False)
    assert simulated.run_concurrently(PROMPT, params, mode) == Cluster(target, None, VirtualClock()).run_concurrently(
        PROMPT, params, "ar"
    )


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_prepared_branches_of_a_block_head_are_served(target: LoadedModel, temp: float) -> None:
    """With a head that predicts the token after any given one: the first token of each branch is accepted."""
    run = make_head_cluster(target, block_token_head(target), depth=2).run(PROMPT, sampling(temp), "ssd")
    assert any(round_.source == "hit" and len(round_.chain) > 1 for round_ in run.rounds) and accepted(run) > 0


def test_block_head_needs_fresh_target_features(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that predicts from the target's latest features fails if they are replaced by zeros or by older ones."""
    fresh = make_head_cluster(target, block_feature_head(target)).run(PROMPT, sampling(0.0), "sd")
    zeroed, stale = block_feature_head(target), block_feature_head(target)
    fuse = stale.fuse
    monkeypatch.setattr(zeroed, "fuse", lambda rows: mx.zeros_like(fuse(rows)))
    monkeypatch.setattr(stale, "fuse", lambda rows: mx.roll(fuse(rows), 1, axis=0))
    others = [make_head_cluster(target, head).run(PROMPT, sampling(0.0), "sd") for head in (zeroed, stale)]
    assert accepted(fresh) > max(map(accepted, others)) + 0.2


@pytest.mark.parametrize(("make_head", "mode"), [(block_head, "sd"), (gated_head, "ssd"), (block_token_head, "ssd")])
def test_block_heads_cache_equals_a_fresh_read_after_each_round(
    target: LoadedModel, make_head: MakeHead, mode: str
) -> None:
    """Rejected blocks leave nothing in the cache, and each row of features is read once, whatever is accepted."""
    head = make_head(target)
    received_rows: dict[int, np.ndarray[Any, Any]] = {}
    seen: set[int] = set()

    def check(tree: TokenTree, text: Sequence[int]) -> None:
        assert isinstance(tree, BlockTree)
        if tree._nodes and tree.committed_len > len(PROMPT) and not tree.kv_rows.features.count:
            seen.add(tree.committed_len)
            assert column_tokens(tree) == list(text[: tree.committed_len])
            assert tree.kv_rows.feature_positions.tolist() == list(range(tree.kv_rows.features.end))
            assert (
                cache_distance(head, tree, np.stack([received_rows[at] for at in range(tree.kv_rows.features.end)]))
                < 2e-3
            )

    simulated = make_head_cluster(target, head, schedule=MIXED, after_draft=check)
    send = simulated.send_worker

    def send_and_record(name: str, message: Message) -> None:
        if isinstance(message, Features):
            received_rows.update(enumerate(message.rows, message.position))
        send(name, message)

    simulated.send_worker = send_and_record  # type: ignore[method-assign]
    run = simulated.run(PROMPT, sampling(0.8), mode)
    assert len(seen) > 4 and run.timings.predicted_n == LENGTH


def cache_distance(head: DFlash, tree: BlockTree, rows: np.ndarray[Any, Any]) -> float:
    """Returns the largest difference of the tree's KV cache from that of a head that is fed these rows at once."""
    text = [1] * (len(rows) + 1)
    fresh = HeadDrafter(head, 10_000).open(text, SamplingParams())
    assert isinstance(fresh, BlockTree)
    fresh.add_features(0, rows)
    fresh.read(text)
    largest = 0.0
    texts = [each.kv_rows.kv_cache.save(each.kv_rows.sequence, len(rows)) for each in (tree, fresh)]
    for actual, theirs in zip(*(text.layers for text in texts), strict=True):
        for layer, expected_layer in zip(actual, theirs, strict=True):
            largest = max(largest, float(mx.abs(layer - expected_layer).max().item()))
    return largest
