"""A head in the draft worker works ahead from the target's rows, and the text is the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.drafter import TokenTree
from outrider.drafters.heads.drafter import make_for_draft_worker
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
Heads = Callable[[LoadedModel], PairHead]
Plain = Callable[[LoadedModel, Sequence[int], SamplingParams], list[int]]


def sampling(temp: float, seed: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, temp=temp, seed=seed if temp else None)


class Lossy(Cluster):
    """Of what the target tells of its rows a share is lost, and a share comes after what it came before."""

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


def cluster(
    target: LoadedModel, head: PairHead, kind: type[Cluster] = Cluster, cpu: OrtForward | None = None, **other: Any
) -> Cluster:
    drafter = make_for_draft_worker(head, "eagle3", target.vocab_size, cpu=cpu)
    return kind(target, drafter, VirtualClock(), **{"ngrams": False, "full_depth": True, **other})


def accepted(run: Run) -> float:
    return run.timings.draft_n_accepted / max(run.timings.rounds, 1)


PAIRS, RECURRENT, BLOCKS = token_head, recurrent_head, block_head
"""One head of each mechanism; the others differ in what they compute."""


@pytest.mark.parametrize(
    ("made", "mode", "temp"),
    [
        *((made, *way) for made in (PAIRS, RECURRENT, BLOCKS) for way in (("sd", 0.0), ("ssd", 0.8))),
        *((made, "sd", 0.8) for made in (feature_head, mtp_head, gated_head)),
        *((made, "ssd", 0.0) for made in (random_head, parallel_head, convolving_head, block_token_head)),
    ],
)
def test_text_equals_plain_decoding(target: LoadedModel, plain: Plain, made: Heads, mode: str, temp: float) -> None:
    run = cluster(target, made(target), schedule=MIXED).run(PROMPT, sampling(temp), mode)
    assert run.tokens == plain(target, PROMPT, sampling(temp))
    assert mode == "ssd" or any(round_.chain for round_ in run.rounds)  # what a random head prepares never comes


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_concurrent_requests_keep_the_targets_text(target: LoadedModel, mode: str) -> None:
    params = [sampling(temp, seed) for seed, temp in enumerate((0.0, 0.8, 0.8, 0.8))]
    together = cluster(target, token_head(target), full_depth=False).run_together(PROMPT, params, mode)
    assert together == Cluster(target, None, VirtualClock()).run_together(PROMPT, params, "ar")


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("made", [token_head, parallel_token_head])
def test_prepared_branches_of_a_head_are_served(target: LoadedModel, made: Heads, temp: float) -> None:
    """A head that foretells the target's text wherever it knows the token: outcomes have branches, and these hold."""
    run = cluster(target, made(target)).run(PROMPT, sampling(temp), "ssd")
    # How often is the estimates' matter, which follow the machine's clock.
    assert any(round_.source == "hit" and len(round_.chain) > 1 for round_ in run.rounds) and accepted(run) > 0


@pytest.mark.parametrize("made", [feature_head, parallel_feature_head, recurrent_head])
def test_head_needs_fresh_target_features(target: LoadedModel, made: Heads, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token deep the head knows the text from the target's row alone; from none, or an older one, it does not."""
    fresh = cluster(target, made(target)).run(PROMPT, sampling(0.0), "sd")
    zeroed, stale = made(target), made(target)
    fuse = stale.fuse
    monkeypatch.setattr(zeroed, "fuse", lambda rows: mx.zeros_like(fuse(rows)))
    monkeypatch.setattr(stale, "fuse", lambda rows: mx.roll(fuse(rows), 1, axis=0))
    others = [cluster(target, head).run(PROMPT, sampling(0.0), "sd") for head in (zeroed, stale)]
    assert accepted(fresh) > max(map(accepted, others)) + 0.2


@matrix(made=[token_head, random_head, mtp_head, parallel_head], mode=["sd", "ssd"], by_ort=[False, True])
def test_heads_cache_equals_a_fresh_read_after_each_round(
    target: LoadedModel, made: Heads, mode: str, by_ort: bool
) -> None:
    """Whatever was accepted: guesses leave nothing behind, and each true row is read once."""
    head = made(target)
    cpu = unrounded(head, target) if by_ort else None
    received_rows: dict[int, np.ndarray[Any, Any]] = {}
    seen: set[int] = set()

    def check(tree: TokenTree, text: Sequence[int]) -> None:
        assert isinstance(tree, PairTree)
        if tree._nodes and tree.committed_len > len(PROMPT):
            seen.add(tree.committed_len)
            assert column_tokens(tree) == list(text[1 : tree.committed_len])
            rows = np.stack([received_rows[at] for at in range(tree.committed_len - 1)])
            assert distance(head, tree, list(text[: tree.committed_len]), rows) < 2e-3

    played = cluster(target, head, schedule=MIXED, cpu=cpu, after_draft=check)
    send = played.send_worker

    def watched(name: str, message: Message) -> None:
        if isinstance(message, Features):
            received_rows.update(enumerate(message.rows, message.position))
        send(name, message)

    played.send_worker = watched  # type: ignore[method-assign]
    run = played.run(PROMPT, sampling(0.8), mode)
    assert len(seen) > 4 and run.timings.predicted_n == LENGTH


def _alone(head: PairHead, feature: mx.array) -> int:
    """What follows a pair of this feature and any token, by the head that looks at nothing else."""
    pairs = PairKVCache(head)
    _, logits = slots(pairs, [PairFeed(pairs.open(), mx.array([1]), feature)], [1])
    return int(mx.argmax(logits).item())


def distance(head: PairHead, tree: PairTree, text: list[int], rows: np.ndarray[Any, Any]) -> float:
    """How far its committed columns are from those of a head that is fed these rows of the text at once."""
    fresh = PairKVCache(head)
    read(fresh, [PairFeed(fresh.open(), mx.array(text[1:]), mx.array(rows).astype(mx.float32))])
    columns = [*range(tree._layout.prefix), *tree._recent]
    apart = 0.0
    kept = tree.kv_rows.kv_cache.save(tree.kv_rows.sequence, max(columns) + 1)
    for own, true in zip(kept.layers, fresh._layers, strict=True):
        for mine, theirs in zip(own, true.copy_columns(len(text) - 1), strict=True):
            apart = max(apart, float(mx.abs(mx.take(mine, mx.array(columns), axis=2) - theirs).max().item()))
    return apart


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_recurrent_head_gets_one_row_a_round_and_equals_a_fresh_one(target: LoadedModel, mode: str) -> None:
    head, received_rows = recurrent_head(target), dict[int, np.ndarray[Any, Any]]()
    fresh, seen, rows = make_for_draft_worker(head, "redrafter", target.vocab_size), set[int](), list[int]()

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

    played = cluster(target, head, schedule=MIXED, after_draft=check)
    send = played.send_worker

    def watched(name: str, message: Message) -> None:
        if isinstance(message, Features):
            rows.append(len(message.rows))
            received_rows[message.position] = message.rows
        send(name, message)

    played.send_worker = watched  # type: ignore[method-assign]
    run = played.run(PROMPT, sampling(0.8), mode)
    assert set(rows) == {1} and len(rows) - run.timings.rounds in (0, 1)  # what comes behind the end is no round
    assert len(seen) > 4 and run.timings.predicted_n == LENGTH


def test_missing_row_is_replaced_by_the_heads_mask_feature(target: LoadedModel) -> None:
    """P-EAGLE: in any number of rows not heard of, in one forward, and no more where the row has come."""
    head = parallel_feature_head(target, missing=77)
    tree = make_for_draft_worker(head, "eagle3", target.vocab_size).open(PROMPT, sampling(0.0))
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
        assert tree.best([node]) == [_alone(head, head.mask_feature)]  # type: ignore[attr-defined]
    tree.add_features(len(PROMPT) - 1, np.array(rows[-2:]))
    assert [tree.child(tree.root, 11), tree.child(nodes[0], 12), tree.child(nodes[1], 13)] == [None, None, nodes[2]]
    again = tree.feed([tree.root, tree.next_node], [11, 12])
    assert tree.best(again) == [_alone(head, row[None]) for row in rows[-2:]]


def test_a_token_with_its_row_sees_those_before_it_that_lack_theirs(target: LoadedModel) -> None:
    """After a lost row, tokens fed at once have the scores of tokens fed one by one."""
    head = random_head(target)
    rows = np.array(head.fuse(mx.random.normal((len(PROMPT) + 2, 3 * 64), key=mx.random.key(3))))
    found: list[list[float]] = []
    for at_once in (True, False):
        tree = make_for_draft_worker(head, "eagle3", target.vocab_size).open(PROMPT, sampling(0.0))
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
    """More than a head in the target's process keeps: a draft worker reads a long prompt from its first row on."""
    head = random_head(target)
    drafter, count = make_for_draft_worker(head, "eagle3", target.vocab_size), MAX_BUFFERED + 400
    drafter.context_length = 2 * MAX_BUFFERED
    tree = drafter.open([1], sampling(0.0))
    assert isinstance(tree, PairTree)
    rows = np.array(head.fuse(mx.zeros((count, 3 * 64))))
    for begin in range(0, count, 300):
        tree.add_features(begin, rows[begin : begin + 300])
    assert tree.read([1] * (count + 1)) == count + 1 and tree.pairs == range(count)


@matrix(mode=["sd", "ssd"], head=[token_head, block_token_head], share=[(0.2, 0.3), (1.0, 0.0)])
def test_lost_and_late_feature_rows_change_no_text(
    target: LoadedModel, plain: Plain, head: Heads, mode: str, share: tuple[float, float]
) -> None:
    lost, late = share
    for seed in range(2):
        made = cluster(target, head(target), Lossy, schedule=MIXED, full_depth=False, seed=seed)
        assert isinstance(made, Lossy)
        made.lost, made.late = lost, late
        run = made.run(PROMPT, sampling(0.8), mode)
        assert run.tokens == plain(target, PROMPT, sampling(0.8))
        assert lost == 1.0 or any(round_.chain for round_ in run.rounds)


@matrix(
    mode=["sd", "ssd"],
    kind=[(token_head, {}), (block_token_head, {"depth": 2})],
    who=["replace_target", "replace_drafter"],
)
def test_head_is_fed_again_after_a_worker_restart(
    target: LoadedModel, plain: Plain, kind: tuple[Heads, dict[str, int]], mode: str, who: str
) -> None:
    head, other = kind
    made = cluster(target, head(target), full_depth=False, **other)
    turn, turns = made._turn, iter(range(10_000))

    def turn_and_restart() -> None:
        turn()
        if next(turns) == 6:
            getattr(made, who)()

    made._turn = turn_and_restart  # type: ignore[method-assign]
    run = made.run(PROMPT, sampling(0.8), mode)
    assert run.tokens == plain(target, PROMPT, sampling(0.8))
    assert run.timings.resumed + run.timings.rejoined == 1
    assert any(round_.chain for round_ in run.rounds[-8:])


def test_rows_beyond_half_precision_are_noted_and_not_used(
    target: LoadedModel, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = token_head(target)
    monkeypatch.setattr(head, "fuse", lambda rows: mx.full((rows.shape[0], 64), 1e6))
    run = cluster(target, head, full_depth=False).run(PROMPT, sampling(0.8), "ssd")
    assert run.tokens == plain(target, PROMPT, sampling(0.8))
    assert any("exceed half precision" in note for note in run.notes)
    assert not any(round_.chain for round_ in run.rounds)


def test_head_receives_a_long_prompt_in_pieces(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = np.random.default_rng(5).integers(1, 250, 700).tolist()
    received_rows: list[tuple[int, int]] = []
    made = cluster(target, token_head(target), Lossy, full_depth=False)
    send = made.send_worker

    def watched(name: str, message: Message) -> None:
        received_rows.extend([(message.position, len(message.rows))] if isinstance(message, Features) else [])
        send(name, message)

    monkeypatch.setattr(made, "send_worker", watched)
    run = made.run(prompt, sampling(0.0), "ssd")
    assert received_rows[0] == (0, 512) and received_rows[1] == (512, 187) and received_rows[2][0] == 699
    assert run.tokens == Cluster(target, None, VirtualClock()).run(prompt, sampling(0.0), "ar").tokens
    assert run.timings.cache_hits > 0
