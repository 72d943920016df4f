"""Several drafters in the target's process: each reads its own rows, any may draft any round, no text changes."""

from __future__ import annotations

from collections import deque
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from models.training.draft.ngrams import save_table
from outrider.drafters.growth import Continuation
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.ngrams import NgramDraft, NgramDrafter
from outrider.drafters.work_ahead import run_together
from outrider.engine.loading import LoadedModel
from outrider.protocol.messages import Autonomous, Halt, InProcess, Open, Outcome, Verify
from outrider.protocol.ngrams import INDEX_PIECE_TOKENS, PRIOR_COPIED, NgramTable
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.target_worker import in_process_drafters
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, drafted_chain, run_worker
from tests.target_worker.heads import (
    drafter,
    feature_head,
    mtp_head,
    parallel_token_head,
    token_head,
    write_feature_head,
)

LENGTH, DEPTH = 24, 3
FREE_ROWS = (0.0,) * (DEPTH + 1)
PROMPTS = [[40, 41, 42], [7, 8], [90], [100 + n for n in range(30)]]


def four_drafters(target: LoadedModel) -> InProcessDrafters:
    """Three heads of two kinds, which read different hidden states, and a draft model."""
    heads = {"token": token_head, "feature": feature_head, "mtp": mtp_head}
    own = {name: drafter(make_head(target), target) for name, make_head in heads.items()}  # type: ignore[operator]
    return InProcessDrafters({**own, "draft": MlxDrafter(target)})


def run(
    target: LoadedModel,
    own: InProcessDrafters,
    turns: list[str],
    temp: float,
    requests: int = 1,
    eos: tuple[int, ...] = (),
    min_prob: float = 1.0,
) -> dict[str, list[tuple[str, Outcome]]]:
    """Runs requests for which the drafters in `turns` draft in turn, for request n from the nth on.

    Returns for each request the drafter's name and the outcome of each round.
    """
    opens = [
        Open(str(n), 0, 0, np.array(prompt, np.int32), SamplingParams(temp=temp, seed=n if temp else None), eos)
        for n, prompt in enumerate(PROMPTS[:requests])
    ]
    link = FakeLink("target-0", deque(opens))
    worker = TargetWorker(link, target, drafters=own)  # type: ignore[arg-type]
    found = {one.request: [("", one)] for one in run_worker(worker, link, ())}
    by = {o.request: cycle(turns[n % len(turns) :] + turns[: n % len(turns)]) for n, o in enumerate(opens)}
    while any(len(texts(rounds)) < LENGTH for rounds in found.values()):
        messages, names = [], {request: next(each) for request, each in by.items()}
        for request, name in names.items():
            running = worker._running[request]
            at, draft = len(running.slot.tokens), InProcess(DEPTH, name, min_prob, FREE_ROWS) if name else None
            messages += [Verify(request, 0, running.round + 1, at, Autonomous(9, draft))]
            messages += [Halt(request, 0)]
        for one in run_worker(worker, link, messages):
            assert isinstance(one, Outcome), one
            found[one.request].append((names[one.request], one))
    return found


def texts(rounds: list[tuple[str, Outcome]]) -> list[int]:
    return [token for _, a in rounds for token in [*accepted(a), a.bonus]]


def accepted(outcome: Outcome) -> list[int]:
    """The accepted tokens of a chain, or of a tree."""
    chain = drafted_chain(outcome)
    return [chain[node] for node in outcome.path or range(outcome.accepted)]


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("requests", [1, 4])
def test_text_is_the_targets_own_with_any_drafter_in_any_round(target: LoadedModel, temp: float, requests: int) -> None:
    alone = run(target, InProcessDrafters({}), [""], temp, requests)
    found = run(target, four_drafters(target), ["token", "draft", "", "feature", "mtp"], temp, requests)
    for request, rounds in found.items():
        assert texts(rounds)[:LENGTH] == texts(alone[request])[:LENGTH]
    drafted = {name for rounds in found.values() for name, a in rounds if drafted_chain(a)}
    assert drafted == {"token", "draft", "feature", "mtp"}


@pytest.mark.parametrize("min_prob", [1.0, 0.01])
@pytest.mark.parametrize("name", ["token", "draft", "ngram"])
def test_drafts_end_before_an_end_token(target: LoadedModel, name: str, min_prob: float, tmp_path: Path) -> None:
    """If the target chooses it, the text ends there in any case, and later tokens don't count."""
    alone = texts(run(target, InProcessDrafters({}), [""], 0.0)["0"])
    written = [*PROMPTS[0], *alone]
    known = {tuple(written[at : at + 2]): (written[at + 2], 0.9) for at in range(len(written) - 2)}
    save_table(tmp_path / "table", known, {})
    own = InProcessDrafters(
        {**four_drafters(target).drafters, "ngram": NgramDrafter(NgramTable.load(tmp_path / "table"))}
    )
    found = [run(target, own, [name], 0.0, 1, eos, min_prob)["0"] for eos in ((), tuple(alone[4:14:3]))]
    drafted = [[{*drafted_chain(outcome)} for _, outcome in rounds] for rounds in found]
    assert all(texts(rounds)[:LENGTH] == alone[:LENGTH] for rounds in found)
    assert any(drafted[1]) and any(tokens & {*alone[4:14:3]} for tokens in drafted[0])
    assert not any(tokens & {*alone[4:14:3]} for tokens in drafted[1])


def test_head_that_can_not_open_its_tree_ends_only_its_own_drafting(
    target: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when memory is short while it copies the cached prefix of the text."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[malloc] out of memory")

    monkeypatch.setattr(HeadDrafter, "tree", fail)
    alone = run(target, InProcessDrafters({}), [""], 0.0, 2)
    found = run(target, four_drafters(target), ["token", "draft"], 0.0, 2)
    for request, rounds in found.items():
        assert texts(rounds)[:LENGTH] == texts(alone[request])[:LENGTH]
        assert {name for name, outcome in rounds if drafted_chain(outcome)} == {"draft"}


@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_ngrams_of_a_table_change_no_token_and_save_rounds(target: LoadedModel, temp: float, tmp_path: Path) -> None:
    alone = run(target, InProcessDrafters({}), [""], temp, 4)
    written = [[*PROMPTS[int(request)], *texts(rounds)] for request, rounds in alone.items()]
    known = {text[at : at + 3]: (text[at + 3], 0.9) for text in map(tuple, written) for at in range(len(text) - 3)}
    wrong = {text[at : at + 2]: (text[at], 0.9) for text in map(tuple, written) for at in range(len(text) - 2)}
    for entries, fewer in ((known, True), (wrong, False)):
        save_table(tmp_path / "table", entries, {})
        own = InProcessDrafters({"ngram": NgramDrafter(NgramTable.load(tmp_path / "table"))})
        found = run(target, own, ["ngram"], temp, 4)
        for request, rounds in found.items():
            assert texts(rounds)[:LENGTH] == texts(alone[request])[:LENGTH]
        count, count_alone = (sum(map(len, of.values())) for of in (found, alone))
        assert not fewer or count < 0.6 * count_alone
        assert any(drafted_chain(outcome) for rounds in found.values() for _, outcome in rounds)


def copy(draft: NgramDraft, text: list[int]) -> tuple[int, ...]:
    (found,), _ = run_together([draft.turn(text, InProcess(2, row_costs=FREE_ROWS)).steps])
    assert isinstance(found, Continuation)
    return found.chain


def test_copy_is_proposed_where_a_text_repeats() -> None:
    draft = NgramDraft(NgramDrafter())
    assert copy(draft, [1, 2, 3, 4, 1, 2]) == (3, 4)
    assert copy(draft, [1, 2, 3, 4, 1, 2, 9]) == ()


def test_text_that_is_set_twice_is_indexed_and_judged_once() -> None:
    drafter = NgramDrafter()
    draft, text = NgramDraft(drafter), [1, 2, 3, 4, 1, 2]
    found = [copy(draft, text) for _ in range(2)]
    assert found == [(3, 4)] * 2 and drafter.acceptance.rate(2, 0) == PRIOR_COPIED


def test_long_prompt_is_indexed_over_several_rounds() -> None:
    draft = NgramDraft(NgramDrafter())
    text = [*range(4 * INDEX_PIECE_TOKENS), *range(800, 804)]
    found = [copy(draft, text[: len(text) - 3 + n]) for n in range(4)]
    assert found[0] == () and found[-1] == (804, 805)


def test_drafter_beside_others_drafts_the_chains_of_a_single_drafter(target: LoadedModel) -> None:
    """So each gets all of its own rows, also those of rounds for which others drafted."""
    together = run(target, four_drafters(target), ["token", "feature", "mtp"], 0.0)["0"]
    for name, make_head in (("token", token_head), ("feature", feature_head), ("mtp", mtp_head)):
        own = InProcessDrafters({name: drafter(make_head(target), target)})  # type: ignore[operator]
        alone = run(target, own, [name], 0.0)["0"]
        chains_of_single = {a.base_len: drafted_chain(a) for _, a in alone if drafted_chain(a)}
        shared = [
            (chains_of_single[a.base_len], drafted_chain(a))
            for name_of_drafter, a in together
            if name_of_drafter == name and a.base_len in chains_of_single
        ]
        assert shared and all(before == now for before, now in shared)


def test_unusable_drafter_is_left_out_with_a_reason(target: LoadedModel, tmp_path: Path) -> None:
    head = write_feature_head(tmp_path / "head", target)
    kinds = [("eagle3", str(tmp_path / "none")), ("eagle3", str(head)), ("draft", str(tmp_path / "none"))]
    loaded = in_process_drafters.load(kinds, target, lambda stage: None, unsharded=True)
    assert list(loaded.drafters) == ["eagle3-2"] == [one.name for one in loaded.infos]
    assert loaded.infos[0].is_head and loaded.infos[0].agreement > 0.1 and 0 < loaded.infos[0].weight < 1
    assert [note.split(" is not used: ")[0] for note in loaded.left_out] == [
        "drafter eagle3",
        "drafter draft",
    ]


def test_weight_of_a_head_is_its_share_of_the_parameters_and_less_for_a_block(target: LoadedModel) -> None:
    alone, block = drafter(token_head(target), target), drafter(parallel_token_head(target), target)
    weight = in_process_drafters._relative_cost(alone, target)
    assert weight == alone.parameters / target.parameters
    assert in_process_drafters._relative_cost(block, target) == block.parameters / target.parameters / 4


def test_kv_memory_is_divided_by_bytes_per_token(target: LoadedModel) -> None:
    own = four_drafters(target)
    whole = own.cost + KvCost(0, 1000)
    left = own.divide_memory(1_000_000, 100, whole)
    assert left == pytest.approx(1_000_000 * 1000 / whole.per_token, rel=0.1)
