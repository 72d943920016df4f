"""A head also proposes its next best tokens, as trees that change no text and with probabilities that it learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.fan_out import Calibration
from outrider.drafters.growth import Continuation
from outrider.drafters.heads.drafter import HeadDraft, HeadDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.work_ahead import run_together
from outrider.engine.loading import LoadedModel
from outrider.protocol.messages import Autonomous, InProcess, Open, Outcome, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, drafted_chain, run_worker
from tests.target_worker.block_heads import block_head, linked_head, parallel_head
from tests.target_worker.heads import drafter, token_head

HEADS = [token_head, block_head, linked_head, parallel_head]


def draft_with_features(own: HeadDrafter, sampling: SamplingParams) -> HeadDraft:
    """A text's draft, which has the features of three tokens."""
    draft = own.open_draft(sampling)
    draft.add_features(0, mx.ones((3, 64)))
    return draft


@pytest.mark.parametrize("make_head", HEADS)
def test_tree_holds_the_chain_first_and_then_the_next_best_tokens(
    target: LoadedModel, make_head: Callable[[LoadedModel], Head]
) -> None:
    own, text = drafter(make_head(target), target), [5, 6, 7, 8]
    found = []
    for min_prob in (1.0, 0.01):
        draft = draft_with_features(own, SamplingParams(temp=0.8, seed=4))
        found += run_together([draft.turn(text, InProcess(3, min_prob=min_prob)).steps])[0]
    plain, tree = found
    assert isinstance(plain, Continuation) and isinstance(tree, Continuation)
    assert tree.line == plain.chain and plain.parents == ()
    assert tree.chain[:3] == plain.chain and tree.parents[:3] == (-1, 0, 1)
    others = [(parent, token) for parent, token in zip(tree.parents[3:], tree.chain[3:], strict=True)]
    assert len(others) > 2 and len({*others, *zip(tree.parents[:3], plain.chain, strict=True)}) == len(tree.chain)


def test_accepted_alternative_is_learned(target: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = []
    monkeypatch.setattr(Calibration, "learn", lambda self, points, *rest: learned.append((len(points), *rest)))
    own = drafter(token_head(target), target)
    draft, text = draft_with_features(own, SamplingParams()), [5, 6, 7, 8]
    (tree,), _ = run_together([draft.turn(text, InProcess(3, min_prob=0.001)).steps])
    assert isinstance(tree, Continuation)
    other = next(t for parent, t in zip(tree.parents[3:], tree.chain[3:], strict=True) if parent == 0)
    text += [tree.chain[0], other, 9]
    draft.turn(text, InProcess(3, min_prob=0.001))
    assert learned == [(2, 3, 1, 0)]


def outcomes_of(
    target: LoadedModel, make_head: Callable[[LoadedModel], Head] | None, temp: float, requests: int
) -> list[Outcome]:
    opens = [
        Open(str(n), 0, 0, np.array([40 + n, 7], np.int32), SamplingParams(temp=temp, seed=n if temp else None))
        for n in range(requests)
    ]
    link = FakeLink("target-0", deque(opens))
    own = InProcessDrafters({"own": drafter(make_head(target), target)}) if make_head else None
    worker = TargetWorker(link, target, drafters=own)  # type: ignore[arg-type]
    run_worker(worker, link, ())
    draft = InProcess(3, min_prob=0.02) if own else None
    go = [Verify(o.request, 0, 1, 3, Autonomous(24, draft)) for o in opens]
    return run_worker(worker, link, go)


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("make_head", HEADS)
def test_text_with_alternatives_equals_that_of_the_target(
    target: LoadedModel, make_head: Callable[[LoadedModel], Head], temp: float
) -> None:
    plain, trees = ([], [])  # type: ignore[var-annotated]
    for outcomes, kind in ((plain, None), (trees, make_head)):
        found = outcomes_of(target, kind, temp, 3)
        assert all(isinstance(one, Outcome) for one in found), found
        outcomes += found
    assert any(one.drafted and one.drafted.parents for one in trees)
    for request in map(str, range(3)):
        assert tokens_of(trees, request) == tokens_of(plain, request)


def tokens_of(outcomes: list[Outcome], request: str) -> list[int]:
    found: list[int] = []
    for one in outcomes:
        if one.request == request:
            path = range(one.accepted) if one.path is None else one.path
            found += [*(drafted_chain(one)[node] for node in path), one.bonus]
    return found
