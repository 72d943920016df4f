"""A head in the draft worker drafts ahead from the target's features, and the text is the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.drafter import TokenTree
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import PairHead
from outrider.drafters.heads.pair_kv_cache import MAX_BUFFERED, PairKVCache
from outrider.drafters.heads.trees import PairTree
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.forward import OrtForward
from outrider.protocol.messages import Features, Message
from outrider.protocol.sampling import SamplingParams
from tests.columns import column_tokens
from tests.drafters.pair_feeds import PairFeed, read, slots
from tests.pairwise import matrix
from tests.system.cluster import MIXED, Cluster, Run
from tests.system.links import VirtualClock
from tests.target_worker.block_heads import block_head, block_token_head, convolving_head, gated_head, parallel_head
from tests.target_worker.heads import (
    feature_head,
    mtp_head,
    parallel_feature_head,
    parallel_token_head,
    random_head,
    recurrent_head,
    token_head,
    unrounded,
)

pytestmark = pytest.mark.usefixtures("counted_clock")

LENGTH = 20
PROMPT = [40, 41, 42, 7, 8]
MakeHead = Callable[[LoadedModel], PairHead]
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]


def sampling(temp: float, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, temp=temp, seed=seed if temp else None)


class LossyCluster(Cluster):
    """A cluster in which a share of the FEATURES messages is lost, and a share arrives after the next message."""

    lost = late = 0.0

    def send_worker(self, name: str, message: Message) -> None:
        kept: list[Message] = self.__dict__.setdefault("kept", [])
        chance = self._rng.random() if isinstance(message, Features) else 1.0
        if chance < self.lost:
            return
        if chance < self.lost + self.late:
            kept.append(message)
            return
        super().send_worker(name, message)
        while kept:
            super().send_worker(name, kept.pop())


def make_head_cluster(
    target: LoadedModel, head: PairHead, kind: type[Cluster] = Cluster, cpu: OrtForward | None = None, **other: Any
) -> Cluster:
    drafter = HeadDrafter(head, target.vocab_size, cpu=cpu)
    return kind(target, drafter, VirtualClock(), **{"ngrams": False, "full_depth": True, **other})


def accepted(run: Run) -> float:
    return run.timings.draft_n_accepted / max(run.timings.rounds, 1)


PAIRS, RECURRENT, BLOCKS = token_head, recurrent_head, block_head
"""One head of each mechanism; the other heads differ only in their forward."""


@pytest.mark.parametrize(
    ("make_head", "mode", "temp"),
    [
        *((make_head, *way) for make_head in (PAIRS, RECURRENT, BLOCKS) for way in (("sd", 0.0), ("ssd", 0.8))),
        *((make_head, "sd", 0.8) for make_head in (feature_head, mtp_head, gated_head)),
        *((make_head, "ssd", 0.0) for make_head in (random_head, parallel_head, convolving_head, block_token_head)),
    ],
)
def test_text_equals_plain_decoding(
    target: LoadedModel, plain: Plain, make_head: MakeHead, mode: str, temp: float
) -> None:
    run = make_head_cluster(target, make_head(target), schedule=MIXED).run(PROMPT, sampling(temp), mode)
    assert run.tokens == plain(target, PROMPT, sampling(temp))
    assert mode == "ssd" or any(round_.chain for round_ in run.rounds)  # no branch of a random head is ever a hit


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_concurrent_requests_keep_the_targets_text(target: LoadedModel, mode: str) -> None:
    params = [sampling(temp, seed) for seed, temp in enumerate((0.0, 0.8, 0.8, 0.8))]
    together = make_head_cluster(target, token_head(target), full_depth=False).run_concurrently(PROMPT, params, mode)
    assert together == Cluster(target, None, VirtualClock()).run_concurrently(PROMPT, params, "ar")


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("make_head", [token_head, parallel_token_head])
def test_prepared_branches_of_a_head_are_served(target: LoadedModel, make_head: MakeHead, temp: float) -> None:
    """With a head that predicts the token after any given one: outcomes have branches, which are accepted."""
    run = make_head_cluster(target, make_head(target)).run(PROMPT, sampling(temp), "ssd")
    # How often depends on estimates, and so on the machine's speed.
    assert any(round_.source == "hit" and len(round_.chain) > 1 for round_ in run.rounds) and accepted(run) > 0


@pytest.mark.parametrize("make_head", [feature_head, parallel_feature_head, recurrent_head])
def test_head_needs_fresh_target_features(
    target: LoadedModel, make_head: MakeHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that predicts from the target's latest features fails if they are replaced by zeros or by older ones."""
    fresh = make_head_cluster(target, make_head(target)).run(PROMPT, sampling(0.0), "sd")
    zeroed, stale = make_head(target), make_head(target)
    fuse = stale.fuse
    monkeypatch.setattr(zeroed, "fuse", lambda rows: mx.zeros_like(fuse(rows)))
    monkeypatch.setattr(stale, "fuse", lambda rows: mx.roll(fuse(rows), 1, axis=0))
    others = [make_head_cluster(target, head).run(PROMPT, sampling(0.0), "sd") for head in (zeroed, stale)]
    assert accepted(fresh) > max(map(accepted, others)) + 0.2


@matrix(make_head=[token_head, random_head, mtp_head, parallel_head], mode=["sd", "ssd"], by_ort=[False, True])
def test_heads_cache_equals_a_fresh_read_after_each_round(
    target: LoadedModel, make_head: MakeHead, mode: str, by_ort: bool
) -> None:
    """Rejected drafts leave nothing in the cache, and each row of features is read once, whatever is accepted."""
    head = make_head(target)
    cpu = unrounded(head, target) if by_ort else None
    received_rows: dict[int, np.ndarray[Any, Any]] = {}
    seen: set[int] = set()

    def check(tree: TokenTree, text: Sequence[int]) -> None:
        assert isinstance(tree, PairTree)
        if tree._nodes and tree.committed_len > len(PROMPT):
            seen.add(tree.committed_len)
            assert column_tokens(tree) == list(text[1 : tree.committed_len])
            rows = np.stack([received_rows[at] for at in range(tree.committed_len - 1)])
            assert cache_distance(head, tree, list(text[: tree.committed_len]), rows) < 2e-3

    simulated = make_head_cluster(target, head, schedule=MIXED, cpu=cpu, after_draft=check)
    send = simulated.send_worker

    def send_and_record(name: str, message: Message) -> None:
        if isinstance(message, Features):
            received_rows.update(enumerate(message.rows, message.position))
        send(name, message)

    simulated.send_worker = send_and_record  # type: ignore[method-assign]
    run = simulated.run(PROMPT, sampling(0.8), mode)
    assert len(seen) > 4 and run.timings.predicted_n == LENGTH


def _next_token_of(head: PairHead, feature: mx.array) -> int:
    """Returns the token that the head predicts from this feature and any token, without other context."""
    pairs = PairKVCache(head)
    _, logits = slots(pairs, [PairFeed(pairs.open(), mx.array([1]), feature)], [1])
    return int(mx.argmax(logits).item())


def cache_distance(head: PairHead, tree: PairTree, text: list[int], rows: np.ndarray[Any, Any]) -> float:
    """Returns the largest difference of the tree's committed columns from those of a head that is fed these rows at
    once."""
    fresh = PairKVCache(head)
    read(fresh, [PairFeed(fresh.open(), mx.array(text[1:]), mx.array(rows).astype(mx.float32))])
    columns = [*range(tree._layout.prefix), *tree._recent]
    largest = 0.0
    kept = tree.kv_rows.kv_cache.save(tree.kv_rows.sequence, max(columns) + 1)
    for layer, expected in zip(kept.layers, fresh._layers, strict=True):
        for actual, theirs in zip(layer, expected.copy_columns(len(text) - 1), strict=True):
            largest = max(largest, float(mx.abs(mx.take(actual, mx.array(columns), axis=2) - theirs).max().item()))
    return largest


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_recurrent_head_gets_one_row_a_round_and_equals_a_fresh_one(target: LoadedModel, mode: str) -> None:
    head, received_rows = recurrent_head(target), dict[int, np.ndarray[Any, Any]]()
    fresh, seen, rows = HeadDrafter(head, target.vocab_size), set[int](), list[int]()

    def check(tree: TokenTree, text: Sequence[int]) -> None:
        assert isinstance(tree, PairTree)
        if (
            tree._nodes and tree.committed_len > len(PROMPT) and tree.committed_len - 2 in received_rows
        ):  # a round's end
            seen.add(tree.committed_len)
            begun = fresh.open(text[: tree.committed_len], sampling(0.8))
            assert isinstance(begun, PairTree)
            begun.add_features(tree.committed_len - 2, received_rows[tree.committed_len - 2])
            begun.read(text[: tree.committed_len])
            assert mx.abs(tree.scores(tree.root) - begun.scores(begun.root)).max().item() < 1e-4

    simulated = make_head_cluster(target, head, schedule=MIXED, after_draft=check)
    send = simulated.send_worker

    def send_and_record(name: str, message: Message) -> None:
        if isinstance(message, Features):
            rows.append(len(message.rows))
            received_rows[message.position] = message.rows
        send(name, message)

    simulated.send_worker = send_and_record  # type: ignore[method-assign]
    run = simulated.run(PROMPT, sampling(0.8), mode)
    assert set(rows) == {1} and len(rows) - run.timings.rounds in (0, 1)  # a row after the end belongs to no round
    assert len(seen) > 4 and run.timings.predicted_n == LENGTH


def test_missing_row_is_replaced_by_the_heads_mask_feature(target: LoadedModel) -> None:
    """As in P-EAGLE: several missing rows are replaced in one forward, and no longer once the rows have arrived."""
    head = parallel_feature_head(target, missing=77)
    tree = HeadDrafter(head, target.vocab_size).open(PROMPT, sampling(0.0))
    assert isinstance(tree, PairTree)
    rows = head.fuse(mx.random.normal((8, 3 * 64)))
    tree.add_features(0, np.array(rows[: len(PROMPT) - 1]))
    tree.read(PROMPT)
    forwards: list[int] = []
    call, kind = type(head).__call__, type(head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "__call__", lambda *given: forwards.append(given[1].shape[1]) or call(*given))
        nodes = tree.feed([tree.root, tree.next_node, tree.next_node + 1], [11, 12, 13])
    assert forwards == [3]
    for node in nodes:
        assert tree.best([node]) == [_next_token_of(head, head.mask_feature)]  # type: ignore[attr-defined]
    tree.add_features(len(PROMPT) - 1, np.array(rows[-2:]))
    assert [tree.child(tree.root, 11), tree.child(nodes[0], 12), tree.child(nodes[1], 13)] == [None, None, nodes[2]]
    again = tree.feed([tree.root, tree.next_node], [11, 12])
    assert tree.best(again) == [_next_token_of(head, row[None]) for row in rows[-2:]]


def test_a_token_with_its_row_sees_those_before_it_that_lack_theirs(target: LoadedModel) -> None:
    """After a lost row, tokens fed together have the same scores as tokens fed one by one."""
    head = random_head(target)
    rows = np.array(head.fuse(mx.random.normal((len(PROMPT) + 2, 3 * 64), key=mx.random.key(3))))
    found: list[list[float]] = []
    for at_once in (True, False):
        tree = HeadDrafter(head, target.vocab_size).open(PROMPT, sampling(0.0))
        assert isinstance(tree, PairTree)
        tree.add_features(0, rows[: len(PROMPT) - 1])
        tree.read(PROMPT)
        tree.add_features(len(PROMPT) + 1, rows[-1:])  # that of the second token
        nodes, start = [tree.root], tree.next_node
        if at_once:
            nodes = tree.feed([tree.root, start, start + 1, start + 2], [11, 12, 13, 14])
        else:
            for token in (11, 12, 13, 14):
                nodes = tree.feed(nodes, [token])
        found.append(np.array(tree.scores(nodes[-1])).tolist())
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_rows_that_arrive_while_a_drafter_is_busy_all_wait(target: LoadedModel) -> None:
    """All are kept, more than by a head in the target's process: a draft worker reads a long prompt from the start."""
    head = random_head(target)
    drafter, count = HeadDrafter(head, target.vocab_size), MAX_BUFFERED + 400
    drafter.context_length = 2 * MAX_BUFFERED
    tree = drafter.open([1], sampling(0.0))
    assert isinstance(tree, PairTree)
    rows = np.array(head.fuse(mx.zeros((count, 3 * 64))))
    for begin in range(0, count, 300):
        tree.add_features(begin, rows[begin : begin + 300])
    assert tree.read([1] * (count + 1)) == count + 1 and tree.pairs == range(count)


@matrix(mode=["sd", "ssd"], head=[token_head, block_token_head], share=[(0.2, 0.3), (1.0, 0.0)])
def test_lost_and_late_feature_rows_change_no_text(
    target: LoadedModel, plain: Plain, head: MakeHead, mode: str, share: tuple[float, float]
) -> None:
    lost, late = share
    for seed in range(2):
        simulated = make_head_cluster(target, head(target), LossyCluster, schedule=MIXED, full_depth=False, seed=seed)
        assert isinstance(simulated, LossyCluster)
        simulated.lost, simulated.late = lost, late
        run = simulated.run(PROMPT, sampling(0.8), mode)
        assert run.tokens == plain(target, PROMPT, sampling(0.8))
        assert lost == 1.0 or any(round_.chain for round_ in run.rounds)


@matrix(
    mode=["sd", "ssd"],
    kind=[(token_head, {}), (block_token_head, {"depth": 2})],
    who=["replace_target", "replace_drafter"],
)
def test_head_is_fed_again_after_a_worker_restart(
    target: LoadedModel, plain: Plain, kind: tuple[MakeHead, dict[str, int]], mode: str, who: str
) -> None:
    head, other = kind
    simulated = make_head_cluster(target, head(target), full_depth=False, **other)
    turn, turns = simulated._turn, iter(range(10_000))

    def turn_and_restart() -> None:
        turn()
        if next(turns) == 6:
            getattr(simulated, who)()

    simulated._turn = turn_and_restart  # type: ignore[method-assign]
    run = simulated.run(PROMPT, sampling(0.8), mode)
    assert run.tokens == plain(target, PROMPT, sampling(0.8))
    assert run.timings.resumed + run.timings.rejoined == 1
    assert any(round_.chain for round_ in run.rounds[-8:])


def test_rows_beyond_half_precision_are_noted_and_not_used(
    target: LoadedModel, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = token_head(target)
    monkeypatch.setattr(head, "fuse", lambda rows: mx.full((rows.shape[0], 64), 1e6))
    run = make_head_cluster(target, head, full_depth=False).run(PROMPT, sampling(0.8), "ssd")
    assert run.tokens == plain(target, PROMPT, sampling(0.8))
    assert any("exceed half precision" in note for note in run.notes)
    assert not any(round_.chain for round_ in run.rounds)


def test_head_receives_a_long_prompt_in_pieces(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.random.default_rng(5).integers(1, 250, 700).tolist()
    received_rows: list[tuple[int, int]] = []
    simulated = make_head_cluster(target, token_head(target), LossyCluster, full_depth=False)
    send = simulated.send_worker

    def send_and_record(name: str, message: Message) -> None:
        received_rows.extend([(message.position, len(message.rows))] if isinstance(message, Features) else [])
        send(name, message)

    monkeypatch.setattr(simulated, "send_worker", send_and_record)
    run = simulated.run(prompt, sampling(0.0), "ssd")
    assert received_rows[0] == (0, 512) and received_rows[1] == (512, 187) and received_rows[2][0] == 699
    assert run.tokens == Cluster(target, None, VirtualClock()).run(prompt, sampling(0.0), "ar").tokens
    assert run.timings.cache_hits > 0
