"""The target continues by itself only with a branch that was prepared for its outcome."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from outrider.drafters.ngrams import NgramDrafter
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import Autonomous, Branch, Close, DraftTokens, Message, Open, Outcome, Prepare, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, Idle
from tests.system.markov import markov

TABLE = np.random.default_rng(6).normal(size=(6, 6)).astype(np.float32)
PROMPT = np.array([1, 4, 2], np.int32)
LENGTH = 12


def target_text(count: int = LENGTH) -> list[int]:
    """The text of plain decoding."""
    worker, link = open_worker()
    link.inbox.append(Verify("r", 0, 1, len(PROMPT) + 1, Autonomous(count - 1)))
    return [answer.bonus for answer in run_worker(worker, link)]


def open_worker(prompt: Any = PROMPT, eos: tuple[int, ...] = ()) -> tuple[TargetWorker, FakeLink]:
    link = FakeLink("target-0", deque([Open("r", 0, 0, prompt, SamplingParams(), eos)]))
    ngrams = InProcessDrafters({NGRAM: NgramDrafter()})
    worker = TargetWorker(link, markov(TABLE), ngrams)  # type: ignore[arg-type]
    run_worker(worker, link)
    return worker, link


def run_worker(worker: TargetWorker, link: FakeLink) -> list[Any]:
    """Lets the worker run until it would wait; returns all that it has sent."""
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
    worker, link = open_worker()
    wrong = (TEXT[2] + 1) % 6
    link.inbox += [
        Verify("r", 0, 1, len(PROMPT) + 1, DraftTokens((TEXT[1], wrong))),
        prepare(1, Branch((TEXT[1],), ()), Branch((TEXT[1], TEXT[2]), (TEXT[3], TEXT[4]))),
    ]
    _, first, second = run_worker(worker, link)
    assert (first.accepted, first.bonus, first.next_proposal) == (1, TEXT[2], DraftTokens((TEXT[3], TEXT[4])))
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
    worker, link = open_worker()
    link.inbox += [Verify("r", 0, 1, len(PROMPT) + 1), stale]
    found = run_worker(worker, link)
    assert len(found) == 2 and found[-1].next_proposal is None


@pytest.mark.parametrize("left", [1, 2, 3, 9])
def test_ngrams_are_verified_after_another_outcome_if_allowed(left: int) -> None:
    """The chain is as long as its tokens are worth their rows and the request has room."""
    repeated = np.array([*PROMPT, *TEXT, *TEXT], np.int32)
    worker, link = open_worker(repeated)
    (first,) = link.sent
    free, missed = (0.0,) * 6, prepare(1, Branch(((first.bonus + 1) % 6,), (0,)))
    link.inbox += [Verify("r", 0, 1, len(repeated) + 1), replace(missed, row_costs=free, max_tokens=left)]
    _, outcome, *following = run_worker(worker, link)
    if left == 1:
        assert outcome.next_proposal is None and not following
        return
    assert outcome.next_proposal is not None and len(outcome.next_proposal.chain) == min(left - 2, 5)
    assert (following[0].round, following[0].base_len) == (2, len(repeated) + 2)

    worker, link = open_worker(repeated)
    link.inbox += [Verify("r", 0, 1, len(repeated) + 1), replace(missed, row_costs=(0.0, 9.0), max_tokens=left)]
    assert run_worker(worker, link)[1].next_proposal == DraftTokens(), "no token is worth its row"


def test_nothing_follows_an_end_token() -> None:
    worker, link = open_worker(eos=(TEXT[1],))
    link.inbox += [Verify("r", 0, 1, len(PROMPT) + 1), replace(prepare(1), row_costs=(0.0, 0.0), max_tokens=9)]
    assert run_worker(worker, link)[-1].next_proposal is None


def test_repeated_verify_is_answered_with_all_outcomes_since() -> None:
    worker, link = open_worker()
    link.inbox += [Verify("r", 0, 1, len(PROMPT) + 1), prepare(1, Branch((TEXT[1],), (TEXT[2],)))]
    before = run_worker(worker, link)
    link.sent.clear()
    link.inbox.append(Verify("r", 0, 1, len(PROMPT) + 1))
    assert run_worker(worker, link) == before[1:]


def test_request_closed_during_a_verify_sends_no_outcome() -> None:
    worker, link = open_worker()
    link.inbox += [
        Verify("r", 0, 1, len(PROMPT) + 1),
        Close("r"),
        prepare(1, Branch((TEXT[1],), (TEXT[2],))),
    ]
    found: list[Message] = run_worker(worker, link)
    assert sum(isinstance(message, Outcome) for message in found) == 1, "only that of the prompt"
