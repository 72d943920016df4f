"""Trees that the target worker receives, or that its own drafter builds, change no text; outcomes name the branch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from outrider.drafters.growth import Continuation, Steps
from outrider.drafters.heads.drafter import HeadDraft
from outrider.engine.loading import LoadedModel
from outrider.protocol.messages import Autonomous, DraftTokens, InProcess, Open, Outcome, Prepare, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import tree_fault
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, drafted_chain, run_worker
from tests.target_worker.heads import drafter, token_head
from tests.target_worker.test_in_process_head import LENGTH, PROMPTS, run

Alone = Callable[[float, int], list[list[int]]]


@pytest.fixture(scope="module")
def alone(target: LoadedModel) -> Alone:
    return cache(lambda temp, requests: tokens_of(run(target, None, temp, requests)))


def tokens_of(outcomes: Sequence[Sequence[Outcome]]) -> list[list[int]]:
    """The tokens of outcomes that report their own trees."""
    return [[token for a in one for token in (*accepted_tokens(a, drafted_chain(a)), a.bonus)] for one in outcomes]


def accepted_tokens(outcome: Outcome, tokens: Sequence[int]) -> list[int]:
    path = range(outcome.accepted) if outcome.path is None else outcome.path
    assert len(path) == outcome.accepted
    return [tokens[node] for node in path]


def tree_with(chain: Sequence[int], draws: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A tree that contains `chain`, not necessarily first, among random tokens, unknown ids and EOS."""
    nodes: dict[tuple[int, int], int] = {}  # by parent and token

    def add(parent: int, token: int) -> int:
        return nodes.setdefault((parent, token), len(nodes))

    at = -1
    for token in chain:
        for _ in range(draws.randrange(3)):
            add(draws.choice([-1, at]), draws.choice([0, 258, 2**31 - 1, draws.randrange(258)]))
        at = add(at, token)
    tree = tuple(token for _, token in nodes), tuple(parent for parent, _ in nodes)
    assert not tree_fault(*tree)
    return tree


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("requests", [1, 4])
def test_received_and_prepared_trees_do_not_change_the_text(
    target: LoadedModel, alone: Alone, temp: float, requests: int
) -> None:
    truths, draws = alone(temp, requests), random.Random(3)
    opens = [
        Open(str(n), 0, 0, np.array(prompt, np.int32), SamplingParams(temp=temp, seed=n if temp else None))
        for n, prompt in enumerate(PROMPTS[:requests])
    ]
    link = FakeLink("target-0", deque(opens))
    worker = TargetWorker(link, target)  # type: ignore[arg-type]
    run_worker(worker, link, ())
    paths = 0
    for _ in range(3):
        messages: list[Any] = []
        trees = {}
        for number, truth in enumerate(truths):
            running = worker._running[str(number)]
            at = len(running.slot.tokens)
            rest = truth[at - len(PROMPTS[number]) :]
            right = draws.randint(0, 3)
            chain = [*rest[:right], (rest[right] + 1) % 258]
            tokens, parents = tree_with(chain, draws)
            next_tokens, next_parents = tree_with(rest[right + 1 : right + 3], draws)
            committed = tuple(rest[: right + 1])
            place = str(number), 0, running.round + 1, at
            messages += [Verify(*place, DraftTokens(tokens, parents))]
            messages += [Prepare(*place, ((9, 9), committed), ((), next_tokens), ((), next_parents))]
            trees[str(number), running.round + 1], trees[str(number), running.round + 2] = tokens, next_tokens
        found = run_worker(worker, link, messages)
        assert len(found) == 2 * requests
        for outcome in found:
            running, tokens = worker._running[outcome.request], trees[outcome.request, outcome.round]
            own = running.slot.tokens[outcome.base_len : outcome.base_len + outcome.accepted]
            assert accepted_tokens(outcome, tokens) == own
            paths += outcome.path is not None
            following = outcome.next_proposal
            assert following is None or following.chain == trees.get((outcome.request, outcome.round + 1))
    assert paths
    for number, truth in enumerate(truths):
        made = worker._running[str(number)].slot.tokens[len(PROMPTS[number]) :]
        assert made == truth[: len(made)] and len(made) > 9


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("requests", [1, 4])
def test_in_process_drafter_may_return_trees(
    target: LoadedModel, alone: Alone, monkeypatch: pytest.MonkeyPatch, temp: float, requests: int
) -> None:
    own, draws = drafter(token_head(target), target), random.Random(5)
    drafted = HeadDraft._draft

    def in_trees(self: HeadDraft, depth: int, min_prob: float) -> Steps[Continuation]:
        one = yield from drafted(self, depth, min_prob)
        tokens, parents = tree_with(one.chain, draws)
        return Continuation(tokens, parents=parents)

    plain = run(target, drafter(token_head(target), target), temp, requests)
    monkeypatch.setattr(HeadDraft, "_draft", in_trees)
    outcomes = run(target, own, temp, requests)
    assert tokens_of(outcomes) == alone(temp, requests)
    assert any(a.path is not None and a.accepted for one in outcomes for a in one)
    assert sum(len(one) for one in outcomes) <= sum(len(one) for one in plain)


def test_invalid_tree_ends_only_its_request(target: LoadedModel, alone: Alone) -> None:
    opens = [Open(str(n), 0, 0, np.array(PROMPTS[n], np.int32), SamplingParams()) for n in range(2)]
    link = FakeLink("target-0", deque(opens))
    worker = TargetWorker(link, target)  # type: ignore[arg-type]
    run_worker(worker, link, ())
    chain = tuple(alone(0.0, 2)[1][1:3])
    messages = [
        Verify("0", 0, 1, len(PROMPTS[0]) + 1, DraftTokens((4, 4), (-1, -1))),
        Verify("1", 0, 1, len(PROMPTS[1]) + 1, DraftTokens(chain)),
    ]
    fault_, outcome = run_worker(worker, link, messages)
    assert "follows node -1 of a tree twice" in fault_.message
    assert (outcome.request, outcome.accepted) == ("1", 2)


def test_target_without_trees_takes_the_first_branch_of_a_drafted_tree(
    target: LoadedModel, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = drafter(token_head(target), target)
    drafted = HeadDraft._draft

    def in_trees(self: HeadDraft, depth: int, min_prob: float) -> Steps[Continuation]:
        c = (yield from drafted(self, depth, min_prob)).chain
        return Continuation((*c, 5), parents=(*range(-1, len(c) - 1), -1)) if c else Continuation()

    plain = run(target, drafter(token_head(target), target), 0.0)
    monkeypatch.setattr(HeadDraft, "_draft", in_trees)
    opened = Open("0", 0, 0, np.array(PROMPTS[0], np.int32), SamplingParams())
    link = FakeLink("target-0", deque([opened]))
    worker = TargetWorker(link, target, drafters=InProcessDrafters({"own": own}))  # type: ignore[arg-type]
    worker._kv_cache.trees = False  # type: ignore[misc]
    found = run_worker(worker, link, ())
    go = Verify("0", 0, 1, len(PROMPTS[0]) + 1, Autonomous(LENGTH, InProcess(3)))
    outcomes = [*found, *run_worker(worker, link, [go])]
    blank = {"work": plain[0][0].work, "idle_ns": 0, "drafted": None, "peak_bytes": 0}
    seen, expected = ([(replace(one, **blank), drafted_chain(one)) for one in found] for found in (outcomes, plain[0]))
    assert seen == expected
