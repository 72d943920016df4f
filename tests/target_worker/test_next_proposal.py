"""The target continues by itself only with a branch that was prepared for its outcome."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from outrider.protocol.messages import Autonomous, Branch, Close, Coupled, Message, Open, Outcome, Prepare, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, Idle
from tests.system.markov import markov

TABLE = np.random.default_rng(6).normal(size=(6, 6)).astype(np.float32)
PROMPT = np.array([1, 4, 2], np.int32)
LENGTH = 12


def target_text(count: int = LENGTH) -> list[int]:
    """What the target says by itself."""
    worker, link = opened()
    link.inbox.append(Verify("r", 0, 1, len(PROMPT) + 1, Autonomous(count - 1)))
    return [answer.bonus for answer in answers(worker, link)]


def opened() -> tuple[TargetWorker, FakeLink]:
    link = FakeLink("target-0", deque([Open("r", 0, 0, PROMPT, SamplingParams())]))
    worker = TargetWorker(link, markov(TABLE))  # type: ignore[arg-type]
    answers(worker, link)
    return worker, link


def answers(worker: TargetWorker, link: FakeLink) -> list[Any]:
    """Lets the worker run until it would wait."""
    try:
        while worker.turn():
            pass
    except Idle:
        return list(link.sent)


def prepare(round_number: int, *entries: Branch, epoch: int = 0, request: str = "r") -> Prepare:
    committed = tuple(entry.committed for entry in entries)
    return Prepare(request, epoch, round_number, 0, committed, tuple(entry.chain for entry in entries))


TEXT = target_text()


def test_prepared_branch_is_verified_as_the_next_round() -> None:
    worker, link = opened()
    wrong = (TEXT[2] + 1) % 6
    link.inbox += [
        Verify("r", 0, 1, len(PROMPT) + 1, Coupled((TEXT[1], wrong))),
        prepare(1, Branch((TEXT[1],), ()), Branch((TEXT[1], TEXT[2]), (TEXT[3], TEXT[4]))),
    ]
    _, first, second = answers(worker, link)
    assert (first.accepted, first.bonus, first.next_proposal) == (1, TEXT[2], Coupled((TEXT[3], TEXT[4])))
    assert (second.round, second.base_len, second.accepted, second.bonus) == (2, len(PROMPT) + 3, 2, TEXT[5])
    assert second.next_proposal is None


@pytest.mark.parametrize(
    "stale",
    [
        prepare(0, Branch((TEXT[1],), (TEXT[2],))),
        prepare(2, Branch((TEXT[1],), (TEXT[2],))),
        prepare(1, Branch((TEXT[1],), (TEXT[2],)), epoch=1),
        prepare(1, Branch(((TEXT[1] + 1) % 6,), (TEXT[2],))),
        prepare(1, Branch((TEXT[1],), (TEXT[2],)), request="other"),
    ],
)
def test_branch_for_another_outcome_round_epoch_or_request_is_ignored(stale: Prepare) -> None:
    worker, link = opened()
    link.inbox += [Verify("r", 0, 1, len(PROMPT) + 1), stale]
    found = answers(worker, link)
    assert len(found) == 2 and found[-1].next_proposal is None


def test_repeated_verify_is_answered_with_all_outcomes_since() -> None:
    worker, link = opened()
    link.inbox += [Verify("r", 0, 1, len(PROMPT) + 1), prepare(1, Branch((TEXT[1],), (TEXT[2],)))]
    before = answers(worker, link)
    link.sent.clear()
    link.inbox.append(Verify("r", 0, 1, len(PROMPT) + 1))
    assert answers(worker, link) == before[1:]


def test_request_closed_during_a_verify_sends_no_outcome() -> None:
    worker, link = opened()
    link.inbox += [
        Verify("r", 0, 1, len(PROMPT) + 1),
        Close("r"),
        prepare(1, Branch((TEXT[1],), (TEXT[2],))),
    ]
    found: list[Message] = answers(worker, link)
    assert sum(isinstance(message, Outcome) for message in found) == 1, "that of the prompt"
