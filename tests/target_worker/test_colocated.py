"""The target's in-process drafter: rounds without messages, and interruptions that leave the slot correct."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.work_ahead import WorkAhead
from outrider.protocol.messages import (
    Autonomous,
    Close,
    DraftTokens,
    Fault,
    Halt,
    InProcess,
    Open,
    Outcome,
    Resync,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.columns import column_tokens
from tests.system.links import FakeLink, VirtualClock, deliver_during_a_forward, drafted_chain, run_worker
from tests.system.markov import markov

_rng = np.random.default_rng(6)
TABLE = _rng.normal(size=(6, 6)).astype(np.float32)
OTHER = (TABLE + 0.7 * _rng.normal(size=(6, 6))).astype(np.float32)
PROMPT = np.array([1, 4, 2], np.int32)
SAMPLING = SamplingParams(temp=1.0, seed=4)
LENGTH = 60
START = len(PROMPT) + 1  # committed tokens when round 1 begins


class WorkerUnderTest:
    """A target worker with its own drafter, one request open on it."""

    def __init__(self, prompt: Any = PROMPT, eos: tuple[int, ...] = (), drafts: bool = True) -> None:
        self.link = FakeLink("target-0", deque([Open("r", 0, 0, prompt, SAMPLING, eos)]))
        self.opened = 0
        colocated = MlxDrafter(markov(OTHER)) if drafts else None
        if colocated is not None:
            open_tree = colocated.open

            def counted(*arguments: Any) -> Any:
                self.opened += 1
                return open_tree(*arguments)

            colocated.open = counted  # type: ignore[method-assign]
        self.own = colocated
        own = InProcessDrafters({"draft": colocated} if colocated is not None else {})
        self.worker = TargetWorker(self.link, markov(TABLE), drafters=own)  # type: ignore[arg-type]
        run_worker(self.worker, self.link, ())

    def exchange(self, *messages: Any, turns: int = 1000) -> list[Any]:
        """Returns the worker's answers to `messages`, after `turns` of its loop or when it would wait."""
        return run_worker(self.worker, self.link, messages, turns)

    @property
    def tokens(self) -> list[int]:
        return self.worker._running["r"].slot.tokens


def drafting(number: int, base_len: int, depth: int = 3, room: int = LENGTH) -> Verify:
    return Verify("r", 0, number, base_len, Autonomous(room, InProcess(depth)))


def plain_rounds(number: int, base_len: int, room: int) -> Verify:
    return Verify("r", 0, number, base_len, Autonomous(room))


def text(answers: list[Any]) -> list[int]:
    """The tokens that a run of outcomes commits."""
    return [token for a in answers for token in [*drafted_chain(a)[: a.accepted], a.bonus]]


def plain() -> list[int]:
    worker_under_test = WorkerUnderTest(drafts=False)
    worker_under_test.exchange(plain_rounds(1, START, LENGTH))
    return worker_under_test.tokens


TRUTH = plain()


def test_autonomous_rounds_report_their_drafted_chains() -> None:
    worker_under_test = WorkerUnderTest()
    answers = worker_under_test.exchange(drafting(1, START), turns=10)
    assert [a.round for a in answers] == list(range(1, 11))
    assert {len(drafted_chain(a)) for a in answers} == {3}
    assert all(b.base_len == a.base_len + a.accepted + 1 for a, b in pairwise(answers))
    assert 0 < sum(a.accepted for a in answers) < 30
    assert [*TRUTH[:START], *text(answers)] == TRUTH[: START + len(text(answers))] == worker_under_test.tokens


def test_drafting_time_is_reported_apart_from_verify_time() -> None:
    for a in WorkerUnderTest().exchange(drafting(1, START), turns=6):
        assert a.drafted.span.started_ns < a.drafted.span.ended_ns <= a.work.started_ns < a.work.ended_ns
        assert a.idle_ns >= a.drafted.span.ended_ns - a.drafted.span.started_ns


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 17])
def test_chains_leave_room_for_the_bonus_and_rounds_end_at_the_limit(room: int) -> None:
    answers = WorkerUnderTest().exchange(drafting(1, START, depth=4, room=room))
    assert all(a.base_len + len(drafted_chain(a)) < START + room for a in answers)
    assert text(answers) == TRUTH[START : START + room]


def test_rounds_end_with_an_eos_token() -> None:
    end = TRUTH[START + 20]
    at = TRUTH.index(end, START)
    answers = WorkerUnderTest(eos=(end,)).exchange(drafting(1, START))
    assert end in text(answers[-1:]) and end not in text(answers[:-1])
    assert text(answers)[: at + 1 - START] == TRUTH[START : at + 1]


def test_plain_decoding_never_opens_the_drafter() -> None:
    worker_under_test = WorkerUnderTest()
    worker_under_test.exchange(plain_rounds(1, START, 11))
    assert worker_under_test.opened == 0
    worker_under_test.exchange(drafting(12, START + 11), turns=2)
    assert worker_under_test.opened == 1


def test_plain_rounds_received_chains_and_own_chains_can_alternate() -> None:
    worker_under_test, turns = WorkerUnderTest(), 0
    while (base_len := len(worker_under_test.tokens)) < len(TRUTH) - 8:
        turns += 1
        number = worker_under_test.worker._running["r"].round + 1
        wrong = (TRUTH[base_len + 1] + 1) % 6
        message = [
            drafting(number, base_len),
            plain_rounds(number, base_len, 3),
            Verify("r", 0, number, base_len, DraftTokens((TRUTH[base_len], wrong))),
        ][turns % 3]
        found = worker_under_test.exchange(message, turns=2) + worker_under_test.exchange(Halt("r", 0))
        assert all(isinstance(a, Outcome) for a in found)
    assert turns > 6
    assert worker_under_test.tokens == TRUTH[: len(worker_under_test.tokens)]
    running = worker_under_test.worker._running["r"]
    columns = column_tokens(running._drafting["draft"]._work.tree)  # type: ignore[union-attr]
    assert columns == TRUTH[: len(columns)]


def test_close_ends_autonomous_rounds() -> None:
    worker_under_test = WorkerUnderTest()
    assert len(worker_under_test.exchange(drafting(1, START), turns=4)) == 4
    assert worker_under_test.exchange(Close("r")) == [] and not worker_under_test.worker._running


def test_open_of_a_new_epoch_restarts_the_request() -> None:
    worker_under_test = WorkerUnderTest()
    worker_under_test.exchange(drafting(1, START), turns=3)
    again = worker_under_test.exchange(Open("r", 1, 3, np.array(TRUTH[:9], np.int32), SAMPLING))
    assert [(a.epoch, a.round, a.bonus) for a in again] == [(1, 3, TRUTH[9])]
    answers = worker_under_test.exchange(replace(drafting(4, 10, depth=2, room=40), epoch=1), turns=4)
    assert text(answers) == TRUTH[10 : 10 + len(text(answers))] and len(answers) == 4


def test_verify_stops_autonomous_rounds_and_continues_from_them() -> None:
    worker_under_test = WorkerUnderTest()
    last = worker_under_test.exchange(drafting(1, START), turns=3)[-1]
    at = last.base_len + last.accepted + 1
    answers = worker_under_test.exchange(Verify("r", 0, last.round + 1, at, DraftTokens((TRUTH[at],))))
    assert [(a.accepted, a.bonus, a.drafted) for a in answers] == [(1, TRUTH[at + 1], None)]


def test_repeated_verify_is_answered_while_its_outcome_is_kept() -> None:
    worker_under_test = WorkerUnderTest()
    answers = worker_under_test.exchange(drafting(1, START), turns=3) + worker_under_test.exchange(Halt("r", 0))
    assert worker_under_test.exchange(drafting(3, answers[2].base_len)) == answers[2:]
    assert worker_under_test.exchange(drafting(1, START)) == [Resync("r", 0)]
    assert worker_under_test.exchange(drafting(5, 7)) == [Resync("r", 0)]


def test_verify_repeated_during_a_long_round_changes_nothing() -> None:
    worker_under_test = WorkerUnderTest()

    def again() -> Verify:
        last = worker_under_test.worker._running["r"].answers[-1]
        at = last.base_len + last.accepted + 1
        return drafting(last.round + 1, at, room=LENGTH - (at - START))

    deliver_during_a_forward(worker_under_test.worker, worker_under_test.link, again, after=3)
    found = worker_under_test.exchange(drafting(1, START))
    assert all(isinstance(answer, Outcome) for answer in found)
    assert text(found) == TRUTH[START : START + LENGTH]


def test_draft_request_without_a_drafter_is_a_fault() -> None:
    (fault,) = WorkerUnderTest(drafts=False).exchange(drafting(1, START))
    assert isinstance(fault, Fault) and "no in-process drafter" in fault.message


# --- while the drafter reads a prompt of several pieces --------------------------------------------------------------

LONG = np.tile(PROMPT, 500)


def begin_reading(*others: Any) -> tuple[WorkerUnderTest, list[Any]]:
    """A worker whose drafter has read the first piece of the prompt of "s", and its answers to `others`."""
    worker_under_test = WorkerUnderTest()
    worker_under_test.exchange(Open("s", 0, 0, LONG, SAMPLING))
    first = replace(drafting(1, len(LONG) + 1), request="s")
    answers = worker_under_test.exchange(first, *others, turns=1)
    work = worker_under_test.worker._running["s"]._drafting["draft"]._work  # type: ignore[union-attr]
    assert work is not None and work.must_read
    return worker_under_test, answers


def test_request_closed_while_the_drafter_reads_its_prompt_ends() -> None:
    worker_under_test, answers = begin_reading()
    assert answers == worker_under_test.exchange(Close("s")) == []
    assert worker_under_test.worker._running.keys() == {"r"}


def test_other_requests_draft_between_the_pieces_of_a_prompt() -> None:
    worker_under_test, answers = begin_reading(drafting(1, START))
    assert worker_under_test.opened == 2 and {answer.request for answer in answers} == {"r"}
    answers += worker_under_test.exchange()
    ours, theirs = ([a for a in answers if a.request == name] for name in ("r", "s"))
    assert text(ours) == TRUTH[START : START + LENGTH]
    assert {len(drafted_chain(a)) for a in theirs[:3]} == {3}
    alone = WorkerUnderTest(LONG)
    assert text(theirs) == text(alone.exchange(drafting(1, len(LONG) + 1)))


def test_reading_a_prompt_does_not_count_as_drafting_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would raise the measured cost of a drafted token for all requests that draft meanwhile."""
    clock, read = VirtualClock(), WorkAhead.read
    monkeypatch.setattr("outrider.protocol.clock.now", clock)

    def read_slowly(work: WorkAhead) -> bool:
        clock.skip(1_000_000_000)
        return read(work)

    monkeypatch.setattr(WorkAhead, "read", read_slowly)
    worker_under_test, answers = begin_reading(drafting(1, START))
    answers += worker_under_test.exchange()
    drafted = {answer.request: answer.drafted.span.milliseconds for answer in answers[::-1]}
    assert clock() > 3_000_000_000 and drafted.keys() == {"r", "s"} and max(drafted.values()) < 500


def test_one_prompt_is_read_at_a_time() -> None:
    """A piece before each forward, in order of arrival, however many requests draft for the first time."""
    worker_under_test = WorkerUnderTest()
    worker_under_test.exchange(*(Open(name, 0, 0, LONG, SAMPLING) for name in "st"))
    worker_under_test.link.inbox += [replace(drafting(1, len(LONG) + 1), request=name) for name in "st"]
    unread = list[tuple[int, ...]]()
    for _ in range(5):
        worker_under_test.exchange(turns=1)
        works: list[Any] = [worker_under_test.worker._running[name]._drafting["draft"] for name in "st"]
        unread.append(tuple(len(session._work._unfed) for session in works))
    assert unread == [(989, 1501), (477, 1501), (0, 989), (0, 477), (0, 0)]


def test_verify_replaces_the_draft_whose_prompt_is_read() -> None:
    """The request continues without its drafter, which reads the rest when it is asked to draft again."""
    worker_under_test, _ = begin_reading()
    at = len(LONG) + 1
    (plain,) = worker_under_test.exchange(Verify("s", 0, 1, at, DraftTokens()))
    assert (plain.round, plain.drafted) == (1, None)
    drafted = worker_under_test.exchange(replace(drafting(2, at + 1), request="s"))
    assert len(drafted_chain(drafted[0])) == 3 and worker_under_test.opened == 1
    alone = WorkerUnderTest(LONG)
    assert text([plain, *drafted])[:50] == text(alone.exchange(drafting(1, at)))[:50]


def test_failure_in_the_middle_of_a_prompt_ends_only_its_drafts(caplog: pytest.LogCaptureFixture) -> None:
    worker_under_test, _ = begin_reading()

    def fail(*_: Any) -> None:
        raise RuntimeError("[malloc] out of memory")

    tree: Any = worker_under_test.worker._running["s"]._drafting["draft"]._work.tree  # type: ignore[union-attr]
    tree.kv_rows.prefill = fail
    answers = worker_under_test.exchange()
    assert not any(isinstance(a, Fault) or drafted_chain(a) for a in answers)
    assert len(text(answers)) == LENGTH and "out of memory" in caplog.text
    assert tree.kv_rows.sequence.row < 0, "its row is not free"


class Fails(Exception):
    pass


@pytest.mark.parametrize("where", ["opening", "committing", "drafting"])
def test_requests_that_draft_together_get_the_chains_of_single_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """A request whose drafting fails continues without drafts."""
    alone = [(drafted_chain(a), a.accepted, a.bonus) for a in WorkerUnderTest().exchange(drafting(1, START))]
    worker_under_test = WorkerUnderTest()

    drafter: Any = worker_under_test.own
    plain_open, plain_commit, plain_continuation = drafter.open, WorkAhead.commit, WorkAhead.continuation

    def fail_sometimes(tokens: list[int], length: int) -> None:
        if tokens[:2] == [5, 5] and len(tokens) >= length:
            raise Fails

    def open_tree(tokens: list[int], *others: Any) -> Any:
        fail_sometimes(tokens, 0)
        return plain_open(tokens, *others)

    def commit(self: Any, *given: Any) -> None:
        fail_sometimes(self.tree._committed, 8)
        plain_commit(self, *given)

    def continuation(self: Any, depth: int) -> Any:
        fail_sometimes(self.tree._committed, 8)
        return (yield from plain_continuation(self, depth))

    match where:
        case "opening":
            drafter.open = open_tree
        case "committing":
            monkeypatch.setattr(WorkAhead, "commit", commit)
        case _:
            monkeypatch.setattr(WorkAhead, "continuation", continuation)
    others = [Open(name, 0, 0, np.array(text, np.int32), SAMPLING, ()) for name, text in (("s", [3, 0]), ("t", [5, 5]))]
    worker_under_test.exchange(*others)
    goes = [replace(drafting(1, len(text) + 1), request=name) for name, text in (("s", "30"), ("t", "55"))]
    answers = worker_under_test.exchange(drafting(1, START), *goes)
    of_r = [(drafted_chain(a), a.accepted, a.bonus) for a in answers if isinstance(a, Outcome) and a.request == "r"]
    assert of_r == alone
    assert not [a for a in answers if isinstance(a, Fault)] and caplog.text.count("Fails") >= 1
    lost = [a for a in answers if isinstance(a, Outcome) and a.request == "t"]
    assert sum(a.accepted + 1 for a in lost) > 20 and not any(map(drafted_chain, lost[-5:]))
    assert sum(isinstance(a, Outcome) and a.request == "s" for a in answers) > 10
