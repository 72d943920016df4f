"""A head in the target's process: the text is the target's own, chains come from true rows, failures end no request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.growth import Continuation, Steps, without_forwards
from outrider.drafters.heads.drafter import HeadDraft, HeadDrafter
from outrider.drafters.heads.eagle3 import Eagle3
from outrider.drafters.heads.early_exit import MIN_AGREEMENT
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.load import load as load_head
from outrider.drafters.heads.load import measure_agreement
from outrider.drafters.heads.pair_kv_cache import MAX_BUFFERED
from outrider.engine.hidden_states import HiddenStateReader, HiddenStates
from outrider.engine.kv_cache import CacheSlot, FlatKVCache
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, load
from outrider.engine.verify import PrefillChunk, VerifyInput, begin_forward
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import CannotDraft, ModelFault
from outrider.protocol.messages import Autonomous, DraftTokens, InProcess, Open, Outcome, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.drafters import nextn_heads
from tests.drafters.mtp_heads import model_of, write, write_head
from tests.drafting import HeadText, draft_chains
from tests.forwards import unwrap
from tests.system.links import FakeLink, drafted_chain, run_worker
from tests.target_worker.block_heads import (
    block_feature_head,
    block_head,
    convolving_head,
    linked_head,
    parallel_head,
    write_block_head,
)
from tests.target_worker.heads import (
    drafter,
    feature_head,
    last_row_head,
    latent_head,
    mtp_head,
    random_head,
    recurrent_head,
    token_head,
    write_feature_head,
)

LENGTH, DEPTH = 20, 3
BLOCKS = [block_head, linked_head, convolving_head]
PROMPTS = [[40, 41, 42], [7, 8], [90], [100 + n for n in range(30)]]
Heads = Callable[[LoadedModel], Head]
Alone = Callable[[float, int], list[list[int]]]


@pytest.fixture(scope="module")
def alone(target: LoadedModel) -> Alone:
    """`alone(temp, requests)`: the texts of that many requests without a drafter."""
    return cache(lambda temp, requests: texts(run(target, None, temp, requests)))


def run(target: LoadedModel, own: HeadDrafter | None, temp: float, requests: int = 1) -> list[list[Outcome]]:
    """The outcomes of that many concurrent requests, each of `LENGTH` tokens."""
    opens = [
        Open(str(n), 0, 0, np.array(prompt, np.int32), SamplingParams(temp=temp, seed=n if temp else None))
        for n, prompt in enumerate(PROMPTS[:requests])
    ]
    link = FakeLink("target-0", deque(opens))
    together = InProcessDrafters({"own": own} if own else {})
    worker = TargetWorker(link, target, drafters=together)  # type: ignore[arg-type]
    found = run_worker(worker, link, ())
    draft = InProcess(DEPTH) if own else None
    go = [Verify(o.request, 0, 1, len(o.tokens) + 1, Autonomous(LENGTH, draft)) for o in opens]
    found += run_worker(worker, link, go)
    assert all(isinstance(one, Outcome) for one in found), found
    assert not own or len(getattr(own.kv_cache, "_sequences", ())) <= requests
    return [[one for one in found if one.request == o.request] for o in opens]


@pytest.mark.parametrize("family", ["qwen3_next", "gemma3_text"])
def test_text_of_hybrid_and_windowed_targets_stays_their_own(tiny_model: Callable[..., Path], family: str) -> None:
    """A recurrent target feeds rolled back tokens again, but delivers their rows only once."""
    other = load(tiny_model(family))
    own = drafter(random_head(other), other)
    outcomes = run(other, own, 0.8, 2)
    assert texts(outcomes) == texts(run(other, None, 0.8, 2))
    assert any(drafted_chain(a) for one in outcomes for a in one)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "mimo", "deepseek_v3"])
def test_text_with_the_mtp_head_of_the_model_equals_that_of_the_target(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str
) -> None:
    if family in nextn_heads.MODELS:
        other = load(tiny_model("llama", **nextn_heads.MODELS[family]))
        folder = write(tmp_path, nextn_heads.weights_of(family, other))
    else:
        other, folder = load(model_of(tiny_model, family)), write_head(tmp_path, family)
    own = load_head("mtp", str(folder), other, lambda stage: None)
    outcomes = run(other, own, 0.8, 2)
    assert texts(outcomes) == texts(run(other, None, 0.8, 2))
    assert any(drafted_chain(a) for one in outcomes for a in one)
    assert own.weight_bytes > 0 and "trained for this target" in own.note


def test_plain_rounds_and_received_chains_leave_no_gap_for_the_head(target: LoadedModel, alone: Alone) -> None:
    """The head also gets the rows of tokens that are committed without it, and reads them when it drafts."""
    truth = alone(0.0, 1)[0]
    opened = Open("r", 0, 0, np.array(PROMPTS[0], np.int32), SamplingParams())
    link = FakeLink("target-0", deque([opened]))
    own = drafter(token_head(target), target)
    worker = TargetWorker(link, target, drafters=InProcessDrafters({"own": own}))  # type: ignore[arg-type]
    run_worker(worker, link, ())
    running, start = worker._running["r"], len(PROMPTS[0])
    for turn in range(5):
        at = len(running.slot.tokens)
        rest = truth[at - start :]
        chain = (rest[0], (rest[1] + 1) % 258)
        autonomous = Verify("r", 0, running.round + 1, at, Autonomous(5, None if turn % 3 else InProcess(3)))
        message = Verify("r", 0, running.round + 1, at, DraftTokens(chain)) if turn % 3 == 1 else autonomous
        run_worker(worker, link, [message])
    assert running.slot.tokens[start:] == truth[: len(running.slot.tokens) - start]
    draft = running._drafting["own"]
    assert isinstance(draft, HeadDraft)
    assert len(draft.tree.pairs) + draft.features.count == len(running.slot.tokens) - 1


def texts(outcomes: Sequence[Sequence[Outcome]]) -> list[list[int]]:
    return [[t for a in one for t in [*drafted_chain(a)[: a.accepted], a.bonus]] for one in outcomes]


def mean_accepted(outcomes: Sequence[Sequence[Outcome]]) -> float:
    """Accepted tokens per verify of a chain."""
    rounds = [a for one in outcomes for a in one if a.drafted is not None]
    return sum(a.accepted for a in rounds) / len(rounds)


@pytest.mark.parametrize(
    ("head", "requests", "temp"),
    [
        *((head, 4, 0.8) for head in (token_head, feature_head, random_head, mtp_head, latent_head, recurrent_head)),
        *((head, 4, 0.8) for head in (parallel_head, *BLOCKS)),
        *((head, 1, 0.0) for head in (token_head, recurrent_head, block_head)),
    ],
)
def test_text_with_any_head_equals_that_of_the_target(
    target: LoadedModel, alone: Alone, head: Heads, requests: int, temp: float
) -> None:
    truth = alone(temp, requests)
    outcomes = run(target, drafter(head(target), target), temp, requests)
    assert texts(outcomes) == truth
    assert any(drafted_chain(a) for one in outcomes for a in one)


@pytest.mark.parametrize(("temp", "requests"), [(0.0, 1), (0.8, 4)])
def test_garbage_chains_do_not_change_the_text(
    target: LoadedModel, alone: Alone, monkeypatch: pytest.MonkeyPatch, temp: float, requests: int
) -> None:
    """Empty chains, random tokens, ids outside the vocabulary, or EOS in the middle."""

    def garbage(self: HeadDraft, depth: int, min_prob: float) -> Steps[Continuation]:
        draws = np.random.default_rng(len(self._tokens))
        kinds = [(), (3, 999_999, 5), (0, 0), tuple(draws.integers(0, 258, 3).tolist())]
        return without_forwards(Continuation(kinds[int(draws.integers(4))]))

    monkeypatch.setattr(HeadDraft, "_draft", garbage)
    outcomes = run(target, drafter(random_head(target), target), temp, requests)
    assert texts(outcomes) == alone(temp, requests)
    assert any(999_999 in drafted_chain(a) for one in outcomes for a in one)


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_head_with_the_targets_logits_is_right_within_its_vocabulary(target: LoadedModel, temp: float) -> None:
    """At a temperature, too: its noise is the target's, by the target's token ids."""
    head = token_head(target)
    known = set(head.vocabulary.ids.tolist())  # type: ignore[union-attr]
    rounds = [a for one in run(target, drafter(head, target), temp, 4) for a in one if drafted_chain(a)]
    missed = [a for a in rounds if a.accepted < len(drafted_chain(a))]
    assert len(rounds) > 12 and sum(a.accepted for a in rounds) > len(rounds)
    assert sum(a.bonus in known for a in missed) <= 1  # its attention to itself is not quite exact


@pytest.mark.parametrize("make_head", [feature_head, recurrent_head, block_feature_head])
def test_head_uses_the_features_of_the_right_tokens(
    target: LoadedModel, make_head: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """These heads predict one token from its row alone, but not from zeros or from the row before it."""
    fresh = mean_accepted(run(target, drafter(make_head(target), target), 0.0, 4))
    zeroed = make_head(target)
    original = zeroed.fuse
    monkeypatch.setattr(zeroed, "fuse", lambda rows: mx.zeros_like(original(rows)))
    stale = make_head(target)
    fuse = stale.fuse
    monkeypatch.setattr(stale, "fuse", lambda rows: mx.roll(fuse(rows), 1, axis=0))
    assert fresh > 0.45
    assert mean_accepted(run(target, drafter(zeroed, target), 0.0, 4)) < 0.3
    assert mean_accepted(run(target, drafter(stale, target), 0.0, 4)) < fresh - 0.3


@pytest.mark.parametrize("make_head", [random_head, mtp_head, latent_head, parallel_head, *BLOCKS])
def test_head_state_after_any_acceptance_equals_one_read_at_once(target: LoadedModel, make_head: Heads) -> None:
    """Over several rounds of several requests: drafts leave no trace, and no row is lost or read twice."""
    head = make_head(target)
    own, kv_cache = drafter(head, target), open_kv_cache(target)
    assert isinstance(kv_cache, FlatKVCache)
    kv_cache.tap_hidden_states(HiddenStates(target.model, HiddenStateReader(head.points, head.fuse)))
    slots = [CacheSlot(target, kv_cache, [50 + n, 60, *range(70, 90)], SamplingParams()) for n in range(3)]
    drafts = [own.open_draft(SamplingParams()) for _ in slots]
    received: list[list[mx.array]] = [[] for _ in slots]
    for slot, draft, rows in zip(slots, drafts, received, strict=True):
        slot.listener = lambda at, new, f=draft, r=rows: (f.add_features(at, new), r.append(new))
    begin_forward([], [PrefillChunk(slot, 10) for slot in slots]).commit()
    begin_forward([], [PrefillChunk(slot, 11) for slot in slots]).commit()
    draws = np.random.default_rng(7)
    logits = np.array(target.model(mx.arange(258)[:, None])[:, 0]).argmax(axis=-1)
    for number in range(10):
        chains = []
        for slot in slots:
            chain, k = [], number % 4 if slot is slots[0] else int(draws.integers(4))
            for place in range(3):
                chain.append(int(logits[(chain or slot.tokens)[-1]]))
                if place == k:
                    chain[-1] = (chain[-1] + 1) % 258
            chains.append((tuple(chain), k))
        some = [n for n in range(3) if draws.random() < 0.8]
        draft_chains([HeadText(drafts[n], slots[n].tokens) for n in some], [int(draws.integers(1, 5)) for _ in some])
        outputs = begin_forward(
            [VerifyInput(slot, chain) for slot, (chain, _) in zip(slots, chains, strict=True)]
        ).commit()
        assert [unwrap(v).accepted for v in outputs] == [k for _, k in chains]
    draft_chains([HeadText(f, s.tokens) for f, s in zip(drafts, slots, strict=True)], [2, 3, 1])
    for slot, draft, rows in zip(slots, drafts, received, strict=True):
        features = mx.concatenate(rows)
        assert len(draft.tree.pairs) == len(slot.tokens) - 1 == features.shape[0]
        fresh = HeadDrafter(head, target.vocab_size)
        again = fresh.open_draft(SamplingParams())
        again.add_features(0, features)
        draft_chains([HeadText(again, slot.tokens)], [1])
        for mine, true in zip(layers_of(draft), layers_of(again), strict=True):
            for a, b in zip(mine, true, strict=True):
                assert float(mx.abs(a - b).max().item()) < 1e-3


def layers_of(draft: HeadDraft) -> Any:
    return draft.tree.save(len(draft.tree.pairs) + 1).layers


def test_recurrent_head_depends_only_on_the_newest_row(target: LoadedModel) -> None:
    """Whatever was drafted before, and however many rows came at once; only one is kept."""
    head = recurrent_head(target)
    own, fresh = drafter(head, target), drafter(head, target)
    draws = np.random.default_rng(5)
    draft, text = own.open_draft(SamplingParams()), [3]
    for _ in range(12):
        count = int(draws.integers(1, 5))
        features = head.fuse(mx.array(draws.standard_normal((count, 64)).astype(np.float32)))
        draft.add_features(len(text) - 1, features)
        text += draws.integers(0, 258, count).tolist()
        assert draft.features.count == 1
        if draws.random() < 0.7:
            again = fresh.open_draft(SamplingParams())
            again.add_features(len(text) - 2, features[-1:])
            chain, other = (draft_chains([HeadText(f, text)], [3])[0].chain for d, f in ((own, draft), (fresh, again)))
            assert chain == other and len(chain) == 3
            again.close(discard=True)


def test_head_restarts_after_a_gap_in_its_rows(target: LoadedModel) -> None:
    own = drafter(random_head(target), target)
    draft, text = own.open_draft(SamplingParams()), list(range(5, 45))

    def chain(count: int) -> tuple[int, ...]:
        return draft_chains([HeadText(draft, text[:count])], [2])[0].chain

    draft.add_features(0, mx.ones((9, 64)))
    assert len(chain(10)) == 2 and len(draft.tree.pairs) == 9
    assert chain(10) == () and chain(12) == ()  # no new token, and one without its row
    draft.add_features(20, mx.ones((4, 64)))
    assert len(chain(25)) == 2 and len(draft.tree.pairs) == 4
    draft.close(discard=True)
    draft.add_features(24, mx.ones((1, 64)))
    assert chain(26) == () and not own.kv_cache._sequences


def test_only_the_newest_rows_are_kept_while_nothing_is_drafted(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = drafter(random_head(target), target)
    draft = own.open_draft(SamplingParams())
    text = [n % 250 for n in range(MAX_BUFFERED + 300)]
    for at in range(0, len(text) - 1, 100):
        draft.add_features(at, mx.ones((min(100, len(text) - 1 - at), 64)))
    assert MAX_BUFFERED // 2 <= draft.features.count <= MAX_BUFFERED
    monkeypatch.setattr(own, "context_length", 1 << 20)
    assert len(draft_chains([HeadText(draft, text)], [1])[0].chain) == 1
    assert len(draft.tree.pairs) >= MAX_BUFFERED // 2


def test_non_finite_rows_change_no_text(target: LoadedModel, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    head = token_head(target)
    monkeypatch.setattr(head, "fuse", lambda rows: mx.full((rows.shape[0], 64), mx.inf))
    assert texts(run(target, drafter(head, target), 0.8, 4)) == alone(0.8, 4)


def test_failed_text_of_a_batch_does_not_affect_the_others(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = drafter(token_head(target), target)
    drafts = [own.open_draft(SamplingParams()) for _ in range(2)]
    chains = [HeadText(draft, [5, 6, 7, 8]) for draft in drafts]
    for draft in drafts:
        draft.add_features(0, mx.zeros((3, 64)))
    monkeypatch.setattr(drafts[0].tree, "begin", lambda feed: 1 // 0)
    found = draft_chains(chains, [3, 3])
    assert isinstance(found[0], ModelFault) and len(found[1].chain) == 3
    drafts[1].add_features(3, mx.zeros((1, 64)))
    assert len(draft_chains([HeadText(drafts[1], [5, 6, 7, 8, 9])], [3])[0].chain) == 3


@pytest.mark.parametrize("make_head", [token_head, feature_head, block_feature_head])
def test_trial_tells_a_head_of_this_target_from_an_untrained_one(target: LoadedModel, make_head: Heads) -> None:
    assert measure_agreement(drafter(make_head(target), target), target) > 0.15
    assert measure_agreement(drafter(random_head(target), target), target) < MIN_AGREEMENT


def test_wrong_pairing_of_rows_and_tokens_causes_a_warning(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_feature_head(tmp_path / "head", target)
    assert load_head("eagle3", str(folder), target, lambda stage: None).note == ""
    fuse = Eagle3.fuse
    monkeypatch.setattr(Eagle3, "fuse", lambda self, rows: mx.roll(fuse(self, rows), 1, axis=0))
    own = load_head("eagle3", str(folder), target, lambda stage: None)
    assert own.is_weak and "expected one that was trained for this target" in own.note


def test_head_with_the_fingerprint_of_another_target_is_noted(
    target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert target.folder is not None
    monkeypatch.setattr("outrider.drafters.heads.load.measure_agreement", lambda *_: 1.0)
    for known, other in ((model_digest(target.folder), False), ("0123456789abcdef-", True), ("Qwen/Qwen3-4B", False)):
        own = load_head("dflash", str(write_block_head(tmp_path, target=known)), target, lambda stage: None)
        assert ("by its fingerprint, the head was trained for another target" in own.note) == other
    with pytest.raises(CannotDraft, match="dflash needs the target's whole output layer"):
        load_head("dflash", str(tmp_path), target, lambda stage: None, unsharded=False)


@pytest.mark.parametrize("whole", [True, False])
def test_an_eagle3_head_without_its_own_output_layer_needs_the_whole_target(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    monkeypatch.setattr("outrider.drafters.heads.load.read_head", lambda *_: last_row_head(target))
    with nullcontext() if whole else pytest.raises(CannotDraft, match="eagle3 needs the target's whole output layer"):
        assert load_head("eagle3", str(target.folder), target, lambda stage: None, unsharded=whole)


def test_residual_chain_of_a_head_is_proposed_as_certain(target: LoadedModel) -> None:
    own = drafter(token_head(target), target)
    draft = own.open_draft(SamplingParams(temp=0.8, seed=3, rule="residual"))
    draft.add_features(0, mx.zeros((3, 64)))
    (found,) = draft_chains([HeadText(draft, [5, 6, 7, 8])], [3])
    assert len(found.chain) == 3 and found.q is None


def test_penalties_count_the_drafted_chain(target: LoadedModel) -> None:
    own = drafter(token_head(target), target)
    free, bound = own.open_draft(SamplingParams()), own.open_draft(SamplingParams(repetition_penalty=50.0))
    for draft in (free, bound):
        draft.add_features(0, mx.zeros((3, 64)))
    lines: list[Any] = [HeadText(free, [5, 6, 7, 8]), HeadText(bound, [5, 6, 7, 8])]
    plain, other = draft_chains(lines, [18, 18])
    assert len(set(other.chain) - {5, 6, 7, 8}) == 18 and other.chain != plain.chain
