"""Work ahead prepares distinct, likely outcomes; its branches equal a fresh drafter's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from outrider.drafters.fan_out import FAN_OUT_POLICIES, Calibration
from outrider.drafters.growth import BranchTask, ReadyBranches
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.work_ahead import DraftBatcher, WorkAhead
from outrider.protocol.messages import Branch
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import TreeFeed
from tests.columns import column_tokens
from tests.drafting import advance, draft_chain, draft_chains
from tools.simulation.replay import ReplayDrafter, ReplayTree, Script

PROMPT = tuple(range(10, 20))
TEXT = PROMPT + tuple(random.Random(0).randrange(1, 200) for _ in range(300))
# One acceptance for every position: then what follows a place does not depend on how it was reached.
SCRIPT = Script((TEXT,), (0.75,), (0.5, 0.3), 200)


def work_ahead(tokens: tuple[int, ...] = PROMPT, eos: tuple[int, ...] = (), context: int = 1 << 20) -> WorkAhead:
    script = Script(SCRIPT.texts, SCRIPT.acceptance, SCRIPT.bonus_ranks, SCRIPT.vocab_size, context)
    tree = ReplayDrafter(script).open(tokens, SamplingParams())
    return WorkAhead(tree, eos, FAN_OUT_POLICIES["best-first"], Calibration())


def finish(work: WorkAhead) -> list[ReadyBranches]:
    ready = []
    while work.has_work:
        pushed = advance(work)
        ready += [pushed] if pushed is not None else []
    return ready


@pytest.mark.parametrize("chain_length", [0, 1, 4])
def test_branches_grow_to_full_depth_for_distinct_outcomes(chain_length: int) -> None:
    work = work_ahead()
    chain = draft_chain(work, chain_length).chain
    work.commit((), BranchTask(chain, 3, 10))
    last = {(len(e.committed) - 1, e.committed[-1]): e.chain for ready in finish(work) for e in ready.entries}
    assert len(last) == 10
    assert all(len(branch) == 3 for branch in last.values())
    for accepted, bonus in last:
        assert 0 <= accepted <= chain_length
        assert accepted == chain_length or bonus != chain[accepted]


@pytest.mark.parametrize("policy", FAN_OUT_POLICIES)
@pytest.mark.parametrize("min_prob", [1.0, 0.01])
def test_drafter_that_knows_only_its_best_tokens_prepares_those(
    policy: str, min_prob: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`TokenTree.candidates` may return fewer than requested: n-grams, for example, have no second best token."""
    ranked = ReplayTree.candidates
    monkeypatch.setattr(ReplayTree, "candidates", lambda *given: [found[:1] for found in ranked(*given)])
    tree = ReplayDrafter(SCRIPT).open(PROMPT, SamplingParams())
    work = WorkAhead(tree, (), FAN_OUT_POLICIES[policy], Calibration())
    work.commit((), BranchTask(None, 4, min_prob=min_prob))
    chain = draft_chain(work, 5).line
    work.commit((), BranchTask(chain[:4], 3, 10, min_prob=min_prob))
    assert {entry.committed for ready in finish(work) for entry in ready.entries} == {chain}


def test_each_token_of_a_branch_comes_with_the_probability_that_it_is_accepted() -> None:
    """A chain on request has the same probabilities as a branch."""
    work = work_ahead()
    work.commit((), BranchTask((), 3, 6))
    entries = [entry for ready in finish(work) for entry in ready.entries]
    assert entries and all(len(entry.odds) == len(entry.chain) and min(entry.odds) > 0 for entry in entries)
    deepest = max(entries, key=lambda entry: len(entry.chain))
    fresh = draft_chain(work_ahead((*PROMPT, *deepest.committed)), len(deepest.chain))
    assert (fresh.chain, fresh.odds) == (deepest.chain, deepest.odds)


@pytest.mark.parametrize("min_prob", [1.0, 0.01])
@pytest.mark.parametrize(("is_right", "least", "most"), [(False, 0.0, 0.3), (True, 0.9, 1.0)])
def test_chains_on_request_show_how_likely_their_tokens_are(
    is_right: bool, least: float, most: float, min_prob: float
) -> None:
    """In SD there are no branches from which to learn it."""
    work, task = work_ahead(), BranchTask(None, 1, min_prob=min_prob)
    for _ in range(40):
        work.commit((), task)
        (token,) = draft_chain(work, 1).line
        work.commit((token, 7) if is_right else (token % 199 + 1, 7), task)
    odds = draft_chain(work, 1).odds[0]
    assert least <= odds <= most


@pytest.mark.parametrize("min_prob", [1.0, 0.01])
def test_a_token_that_was_left_out_of_the_verify_counts_by_the_targets_own(min_prob: float) -> None:
    """The orchestrator does not verify unlikely tokens; otherwise they would seem to be always rejected."""
    calibration = Calibration()
    tree = ReplayDrafter(SCRIPT).open(PROMPT, SamplingParams())
    work = WorkAhead(tree, (), FAN_OUT_POLICIES["uniform"], calibration)
    for _ in range(30):
        work.commit((), BranchTask(None, 3, min_prob=min_prob))
        work.commit(draft_chain(work, 3).line[:2], BranchTask(None, 3, min_prob=min_prob))
    assert calibration.acceptance(1) > 0.9


def test_forwards_of_costly_rows_grow_the_likeliest_branches_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward for each pair of branches prepares the same branches as one for all, the likeliest first."""

    def pushed(rows: int | None) -> list[ReadyBranches]:
        batcher, work = DraftBatcher(), work_ahead()
        monkeypatch.setattr(batcher.capacity, "rows_per_forward", lambda: rows)
        work.commit((), BranchTask((), 3, 8))
        found = []
        while work.has_work:
            (ready,) = batcher.advance([work])
            assert isinstance(ready, ReadyBranches)
            found.append(ready)
        return found

    at_once, in_pairs = pushed(None), pushed(2)
    assert len(at_once[0].entries) == 8 and all(len(ready.entries) <= 2 for ready in in_pairs)
    whole, by_pairs = (
        {(entry.committed, entry.chain) for ready in of for entry in ready.entries if len(entry.chain) == 3}
        for of in (at_once, in_pairs)
    )
    assert whole == by_pairs and len(whole) == 8
    assert in_pairs[0].entries[0].committed == at_once[0].entries[0].committed
    assert [ready.final for ready in in_pairs] == [False] * (len(in_pairs) - 1) + [True]


def test_branches_are_prepared_for_a_drafted_tree_before_any_outcome() -> None:
    """The commit that begins its verify has no tokens from which to learn how good the alternatives were."""
    work = work_ahead()
    work.commit((), BranchTask(None, 3, min_prob=0.05))
    chain = draft_chain(work, 3).chain[:3]
    assert work.proposed is not None
    work.commit((), BranchTask(chain, 3, 8))
    assert len({entry.committed for ready in finish(work) for entry in ready.entries}) == 8


def test_no_alternative_is_an_end_token() -> None:
    """If the target chooses it, the text ends there in any case."""
    offered: list[set[int]] = [set(), set()]
    for part in range(2):
        work = work_ahead(eos=tuple(range(100)) * part)
        work.commit((), BranchTask(None, 3, min_prob=0.001))
        proposed = draft_chain(work, 3)
        work.commit((), BranchTask(proposed.chain[:3], 3, 8, min_prob=0.001))
        grown = [entry.alternatives.tokens for ready in finish(work) for entry in ready.entries if entry.alternatives]
        offered[part] |= {*proposed.chain[3:], *itertools.chain(*grown)}
    assert min(offered[0]) < 100 <= min(offered[1])


def test_only_the_last_push_is_final() -> None:
    work = work_ahead()
    work.commit((), BranchTask(draft_chain(work, 3).chain, 3, 8))
    assert [ready.final for ready in finish(work)][-1:] == [True]
    work.commit(TEXT[10:11], BranchTask((), 3, 8))
    assert not any(ready.final for ready in finish(work)[:-1])


@pytest.mark.parametrize(("context", "branches"), [(len(PROMPT) + 1, 8), (1 << 20, 0)])
def test_lack_of_anything_to_prepare_is_reported_once(context: int, branches: int) -> None:
    work = work_ahead(context=context)
    work.commit((), BranchTask((), 3, branches))
    assert finish(work) == [ReadyBranches((), True)]


def test_no_branch_is_prepared_for_an_eos_outcome() -> None:
    eos = TEXT[10]
    work = work_ahead(eos=(eos,))
    work.commit((), BranchTask((), 2, 12))
    assert all(e.committed[-1] != eos for ready in finish(work) for e in ready.entries)


@pytest.mark.parametrize("min_prob", [1.0, 0.01])
def test_branches_end_with_an_end_token(min_prob: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows it is never verified. The rows go to other branches, and its alternatives are still reported."""
    fed, feed = list[int](), ReplayTree.feed_together

    def count(trees: Sequence[ReplayTree], feeds: Sequence[TreeFeed]) -> list[list[int]]:
        fed.extend(len(one.tokens) for one in feeds)
        return feed(trees, feeds)

    def grow(work: WorkAhead) -> dict[tuple[int, ...], Branch]:
        return {entry.committed: entry for ready in finish(work) for entry in ready.entries}

    plain = work_ahead()
    plain.commit((), BranchTask((), 6, 8))
    outcome, (first, eos, *_) = next((c, e.chain) for c, e in grow(plain).items() if e.chain[0] != e.chain[1])
    monkeypatch.setattr(ReplayTree, "feed_together", staticmethod(count))
    work = work_ahead(eos=(eos,))
    work.commit((), BranchTask((), 6, 8, min_prob=min_prob))
    found = grow(work)
    assert found[outcome].chain == (first, eos) and (found[outcome].alternatives is None) == (min_prob == 1)
    assert all(eos not in e.chain[:-1] and (len(e.chain) == 6 or e.chain[-1] == eos) for e in found.values())
    assert sum(fed) == sum(len(entry.chain) for entry in found.values())
    work.commit(outcome, BranchTask((), 6, 8, min_prob=min_prob))
    again = grow(work)[first,]
    assert again.chain == (eos,) and (again.alternatives is None) == (min_prob == 1)


@pytest.mark.parametrize("forwards", [0, 1, 2, 3, 10])
def test_pushed_branches_equal_those_of_a_fresh_drafter(forwards: int) -> None:
    """Whatever was prepared, pruned or missed before, a branch depends on its place in the text alone."""
    rng = random.Random(forwards)
    work = work_ahead()
    committed = list(PROMPT)
    chain: list[int] = []
    work.commit((), BranchTask((), 3, 8))
    for _ in range(30):
        entries = {}
        for _ in range(forwards):
            if work.has_work and (ready := advance(work)) is not None:
                entries |= {e.committed: e.chain for e in ready.entries}
        for outcome, branch in entries.items():
            place = (*committed, *outcome)
            assert branch == draft_chain(work_ahead(place), len(branch)).chain
        accepted = rng.randrange(len(chain) + 1)
        bonus = TEXT[len(committed) + accepted] if rng.random() < 0.7 else rng.randrange(1, 200)
        new = [*chain[:accepted], bonus]
        committed += new
        chain = list(entries.get(tuple(new), ()))[: rng.randrange(4)]
        work.commit(new, BranchTask(chain, 3, 8))
        fed = column_tokens(work.tree)
        assert fed == committed[: len(fed)]
        assert work.committed_len == len(committed)


def test_branches_get_shorter_near_the_end_of_the_context() -> None:
    work = work_ahead(context=len(PROMPT) + 4)
    work.commit((), BranchTask((), 6, 4))
    assert {len(e.chain) for e in finish(work)[-1].entries} == {3}
    work.commit(TEXT[10:14], BranchTask((), 6, 4))
    assert finish(work) == [ReadyBranches((), True)]
    assert draft_chain(work, 5).chain == ()


@pytest.mark.parametrize("policy", ["best-first", "uniform"])
@pytest.mark.parametrize("chain_length", [0, 4])
def test_drafters_that_divide_outcomes_prepare_those_of_a_single_one(policy: str, chain_length: int) -> None:
    def prepared(branches: int, skip: int) -> set[tuple[int, ...]]:
        tree = ReplayDrafter(SCRIPT).open(PROMPT, SamplingParams())
        work = WorkAhead(tree, (), FAN_OUT_POLICIES[policy], Calibration())
        work.commit((), BranchTask(draft_chain(work, chain_length).chain, 3, branches, skip))
        return {entry.committed for ready in finish(work) for entry in ready.entries}

    parts = [prepared(4, 0), prepared(5, 4), prepared(3, 9)]
    assert [len(part) for part in parts] == [4, 5, 3]
    assert set.union(*parts) == prepared(12, 0)


def test_work_space_of_a_text_whose_drafts_are_all_right_stays_small(tiny_model: Callable[..., Path]) -> None:
    """No column is wasted, so only the length of the text can trigger a gather. Masks grow with the square of it."""
    tree = MlxDrafter.load(str(tiny_model("llama")), lambda _: None).open([5, 6, 7], SamplingParams(max_tokens=900))
    work = WorkAhead(tree, (), FAN_OUT_POLICIES["uniform"], Calibration(), [5, 6, 7])
    for _ in range(70):
        (continuation,) = draft_chains([work], [8])
        work.commit([*continuation.chain, 9], BranchTask(None, 8))
    layout = work.tree._layout  # type: ignore[attr-defined]
    assert work.committed_len > 600 and layout.end - layout.prefix < 300
