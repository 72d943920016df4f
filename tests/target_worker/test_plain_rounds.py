"""Autonomous plain rounds continue until HALT, with one step always under way."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from outrider.protocol.messages import Autonomous, Close, DraftTokens, Halt, Open, Outcome, Resync, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, deliver_during_a_forward, run_worker
from tests.system.markov import markov

TABLE = np.random.default_rng(6).normal(size=(6, 6)).astype(np.float32)
PROMPT = np.array([1, 4, 2], np.int32)
START = len(PROMPT) + 1  # committed tokens when round 1 begins
HALT = Halt("r", 0)


class WorkerUnderTest:
    """A target worker with one request open."""

    def __init__(self, epoch: int = 0) -> None:
        self.link = FakeLink("target-0", deque([Open("r", epoch, 0, PROMPT, SamplingParams(temp=1.0, seed=4))]))
        self.worker = TargetWorker(self.link, markov(TABLE))  # type: ignore[arg-type]
        run_worker(self.worker, self.link, ())

    def exchange(self, *messages: Any, turns: int = 1000) -> list[Any]:
        """Returns the worker's answers to `messages`, after `turns` of its loop or when it would wait."""
        return run_worker(self.worker, self.link, messages, turns)


def plain(number: int, room: int = 50, request: str = "r") -> Verify:
    """A VERIFY that begins plain rounds with round `number`; all rounds before it were plain, too."""
    return Verify(request, 0, number, START + number - 1, Autonomous(room))


TEXT = [answer.bonus for answer in WorkerUnderTest().exchange(plain(1, 20))]


def is_plain_text(answers: list[Any]) -> bool:
    """Whether each round has one token, the target's own, and no round is repeated or left out."""
    return [(a.round, a.bonus) for a in answers] == [(n, t) for n, t in enumerate(TEXT[: len(answers)], start=1)]


def test_plain_rounds_end_at_the_token_limit() -> None:
    found = WorkerUnderTest().exchange(plain(1, 5))
    assert len(found) == 5 and is_plain_text(found)
    assert [a.next_proposal for a in found] == [DraftTokens()] * 4 + [None]


@pytest.mark.parametrize("turns", [1, 2, 3, 7])
def test_halt_is_answered_with_one_last_outcome_that_waits(turns: int) -> None:
    worker_under_test = WorkerUnderTest()
    found = worker_under_test.exchange(plain(1), turns=turns) + worker_under_test.exchange(HALT)
    assert (
        is_plain_text(found)
        and {a.next_proposal for a in found[:-1]} <= {DraftTokens()}
        and found[-1].next_proposal is None
    )
    assert len(found) <= turns + 1
    found += worker_under_test.exchange(Verify("r", 0, len(found) + 1, START + len(found)))
    assert is_plain_text(found) and worker_under_test.exchange(plain(len(found) + 1, 3), turns=1000)


def test_halt_during_a_forward_ends_with_the_step_that_has_begun() -> None:
    worker_under_test = WorkerUnderTest()
    found = worker_under_test.exchange(plain(1), turns=4)
    deliver_during_a_forward(worker_under_test.worker, worker_under_test.link, lambda: HALT)
    found += worker_under_test.exchange()
    assert is_plain_text(found) and [a.next_proposal for a in found] == [DraftTokens()] * (len(found) - 1) + [None]


def test_verify_repeated_during_a_long_step_changes_nothing() -> None:
    worker_under_test = WorkerUnderTest()

    def again() -> Verify:
        number = worker_under_test.worker._running["r"].round + 1
        return plain(number, 13 - number)

    deliver_during_a_forward(worker_under_test.worker, worker_under_test.link, again, after=3)
    found = worker_under_test.exchange(plain(1, 12))
    assert len(found) == 12 and is_plain_text(found)


def test_plain_rounds_end_with_an_eos_token() -> None:
    worker_under_test = WorkerUnderTest()
    end = TEXT[7]
    worker_under_test.exchange(Open("s", 0, 0, PROMPT, SamplingParams(temp=1.0, seed=4), (end,)))
    found = [a.bonus for a in worker_under_test.exchange(plain(1, 20, "s"))]
    assert found == TEXT[: TEXT.index(end) + 1]


@pytest.mark.parametrize("other", [Verify("r", 0, 9, START + 8), Verify("r", 1, 1, START)])
def test_verify_of_another_round_or_epoch_is_answered_with_resync(other: Verify) -> None:
    worker_under_test = WorkerUnderTest()
    found = worker_under_test.exchange(plain(1), turns=3) + worker_under_test.exchange(other, HALT)
    assert any(isinstance(a, Resync) for a in found) and is_plain_text([a for a in found if isinstance(a, Outcome)])


def test_requests_that_share_forwards_generate_their_own_texts() -> None:
    worker_under_test = WorkerUnderTest()
    others = [SamplingParams(temp=0.7, seed=9, top_k=4), SamplingParams(), SamplingParams(temp=1.0, seed=4)]
    alone = []
    for sampling in others:
        single = WorkerUnderTest()
        single.exchange(Open("x", 0, 0, PROMPT, sampling))
        alone.append([a.bonus for a in single.exchange(plain(1, 12, "x"))])
    found = worker_under_test.exchange(plain(1, 40), turns=4)
    for number, sampling in enumerate(others):
        opened = worker_under_test.exchange(Open(f"x{number}", 0, 0, PROMPT, sampling), turns=5)
        found += opened + worker_under_test.exchange(plain(1, 12, f"x{number}"), turns=2)
    found += worker_under_test.exchange()
    outcomes = [a for a in found if a.round > 0]
    for number, text in enumerate(alone):
        assert [a.bonus for a in outcomes if a.request == f"x{number}"] == text
    ours = [a.bonus for a in outcomes if a.request == "r"]
    assert len(ours) == 40 and ours[: len(TEXT)] == TEXT
    assert max(a.rows for a in outcomes) >= 4


def test_rounds_of_one_request_do_not_starve_plain_rounds_of_another() -> None:
    worker_under_test = WorkerUnderTest()
    worker_under_test.exchange(Open("s", 0, 0, PROMPT, SamplingParams(temp=1.0, seed=4)))
    worker_under_test.exchange(plain(1, 20), turns=1)
    before = len(worker_under_test.link.sent)
    for round_number in range(1, 6):
        worker_under_test.exchange(Verify("s", 0, round_number, START + round_number - 1), turns=3)
    requests = [a.request for a in list(worker_under_test.link.sent)[before:]]
    assert requests.count("r") >= 4 and requests.count("s") == 5


def test_prompt_of_a_closed_request_is_never_read() -> None:
    worker_under_test = WorkerUnderTest()
    found = worker_under_test.exchange(Open("s", 0, 0, np.ones(5000, np.int32), SamplingParams()), Close("s"))
    assert not found


def test_close_during_a_step_ends_only_its_request() -> None:
    worker_under_test = WorkerUnderTest()
    worker_under_test.exchange(Open("s", 0, 0, PROMPT, SamplingParams(temp=1.0, seed=4)))
    found = worker_under_test.exchange(plain(1, 12), plain(1, 12, "s"), turns=4) + worker_under_test.exchange(
        Close("r")
    )
    ours = [a for a in found if a.request == "s"]
    assert len(ours) == 12 and is_plain_text(ours)


def test_device_is_idle_only_before_the_first_of_pipelined_rounds() -> None:
    worker_under_test = WorkerUnderTest()
    first, *others = worker_under_test.exchange(plain(1, 7))
    assert first.idle_ns > 0 and not any(a.idle_ns for a in others)
    assert all(after.work.started_ns == before.work.ended_ns for before, after in pairwise([first, *others]))


@pytest.mark.parametrize(
    ("repeated", "turns"), [(plain(1, 10), 1), (plain(1, 10), 2), (plain(1, 10), 3), (plain(0, 1), 1), (plain(0, 1), 2)]
)
def test_repeated_verify_does_not_end_plain_rounds(turns: int, repeated: Verify) -> None:
    worker_under_test = WorkerUnderTest()
    found = worker_under_test.exchange(plain(1, 10), turns=turns) + worker_under_test.exchange(repeated)
    assert not [a for a in found if isinstance(a, Resync)]
    bonuses = {a.round: a.bonus for a in found if a.round > 0}
    assert bonuses == dict(enumerate(TEXT[:10], start=1))


def test_a_repeated_verify_of_the_last_round_is_answered_again() -> None:
    worker_under_test = WorkerUnderTest()
    found = worker_under_test.exchange(plain(1, 10), turns=2) + worker_under_test.exchange(plain(1, 10))
    assert [a.round for a in found].count(1) == 2


def test_verify_of_an_old_epoch_does_not_end_plain_rounds() -> None:
    worker_under_test = WorkerUnderTest(epoch=2)
    found = worker_under_test.exchange(replace(plain(1, 10), epoch=2), turns=2) + worker_under_test.exchange(
        plain(2, 3)
    )
    assert len(found) == 10 and is_plain_text(found)
