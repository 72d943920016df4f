"""Plain rounds that the target makes by itself go on as far as it was told, and further when it is told in time."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine import verify
from outrider.protocol.messages import Close, Open, Outcome, Resync, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, answered
from tests.system.markov import markov

TABLE = np.random.default_rng(6).normal(size=(6, 6)).astype(np.float32)
PROMPT = np.array([1, 4, 2], np.int32)
START = len(PROMPT) + 1  # committed tokens when round 1 begins


class Stand:
    """A target worker with one request open."""

    def __init__(self, epoch: int = 0) -> None:
        self.link = FakeLink("target-0", deque([Open("r", epoch, 0, PROMPT, SamplingParams(temp=1.0, seed=4))]))
        self.worker = TargetWorker(self.link, markov(TABLE))  # type: ignore[arg-type]
        self.worker.turn()

    def say(self, *messages: Verify, turns: int = 1000) -> list[Any]:
        """What the worker answers to these in so many turns, or until it would wait."""
        return answered(self.worker, self.link, messages, turns)


def plain(number: int, ahead: int) -> Verify:
    """`ahead` + 1 plain rounds from this one on, all rounds before having been plain."""
    return Verify("r", 0, number, START + number - 1, (), ahead)


TEXT = [answer.bonus for answer in Stand().say(plain(1, 19))]


def is_plain_text(answers: list[Any]) -> bool:
    """One token a round, all of them the target's, no round twice or left out."""
    return [(a.round, a.bonus) for a in answers] == [(n, t) for n, t in enumerate(TEXT[: len(answers)], start=1)]


@pytest.mark.parametrize("turns", [1, 2, 3, 1000])
def test_rounds_go_on_when_that_is_said_before_they_end_or_after(turns: int) -> None:
    stand = Stand()
    found = stand.say(plain(1, 3), turns=turns) + stand.say(plain(5, 2)) + stand.say(plain(8, 0))
    assert len(found) == 8 and is_plain_text(found)


def test_the_pipeline_stays_full_over_a_prolonging(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = 0
    begin = verify.RunAhead.__init__

    def counted(self: verify.RunAhead, *arguments: Any) -> None:
        nonlocal begun
        begun += 1
        begin(self, *arguments)

    monkeypatch.setattr(verify.RunAhead, "__init__", counted)
    stand = Stand()
    found = stand.say(plain(1, 3), plain(5, 2), plain(8, 4))
    assert len(found) == 12 and is_plain_text(found) and begun == 1


@pytest.mark.parametrize("other", [plain(6, 0), Verify("r", 0, 5, START + 5, ()), Verify("r", 1, 5, START + 4, ())])
def test_what_begins_elsewhere_stops_them_and_is_no_prolonging(other: Verify) -> None:
    stand = Stand()
    found = stand.say(plain(1, 3), turns=1) + stand.say(other)
    assert any(isinstance(a, Resync) for a in found) and is_plain_text([a for a in found if isinstance(a, Outcome)])


def test_lent_branches_of_one_request_do_not_starve_the_plain_rounds_of_another() -> None:
    stand = Stand()
    stand.link.inbox.append(Open("s", 0, 0, PROMPT, SamplingParams(temp=1.0, seed=4)))
    stand.worker.turn()
    stand.say(plain(1, 10), turns=1)
    before = len(stand.link.sent)
    for round_number in range(1, 6):
        stand.say(Verify("s", 0, round_number, START + round_number - 1, ()), turns=1)
    told = [a.request for a in list(stand.link.sent)[before:]]
    assert told.count("r") >= 4 and told.count("s") == 5


def test_a_request_closed_before_its_prompt_is_read_is_never_read() -> None:
    stand = Stand()
    long = np.ones(5000, np.int32)
    stand.link._put_back += [Open("s", 0, 0, long, SamplingParams()), Close("s")]
    found = stand.say()
    assert not [a for a in found if isinstance(a, Outcome)]


def test_the_device_is_at_work_between_pipelined_rounds_and_waits_before_the_first() -> None:
    stand = Stand()
    first, *others = stand.say(plain(1, 6))
    assert first.idle_ns > 0 and not any(a.idle_ns for a in others)
    assert all(after.work.started_ns == before.work.ended_ns for before, after in pairwise([first, *others]))


def test_a_chain_is_no_prolonging() -> None:
    stand = Stand()
    found = stand.say(plain(1, 3)) + stand.say(Verify("r", 0, 5, START + 4, (TEXT[4],)))
    assert (found[-1].accepted, found[-1].bonus) == (1, TEXT[5])


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("repeated", [plain(1, 9), plain(0, 0)])
def test_a_repeated_verify_does_not_end_them(turns: int, repeated: Verify) -> None:
    stand = Stand()
    found = stand.say(plain(1, 9), turns=turns) + stand.say(repeated)
    assert not [a for a in found if isinstance(a, Resync)]
    told = {a.round: a.bonus for a in found if a.round > 0}
    assert told == dict(enumerate(TEXT[:10], start=1))


def test_a_repeated_verify_of_the_last_round_is_answered_again() -> None:
    stand = Stand()
    found = stand.say(plain(1, 9), turns=1) + stand.say(plain(1, 9))
    assert [a.round for a in found].count(1) == 2


def test_a_repeated_prolonging_does_not_end_them() -> None:
    stand = Stand()
    found = stand.say(plain(1, 3), turns=1) + stand.say(plain(5, 4), plain(5, 4))
    assert len(found) == 9 and is_plain_text(found)


def test_a_verify_of_an_epoch_that_is_over_does_not_end_them() -> None:
    stand = Stand(epoch=2)
    ahead = replace(plain(1, 9), epoch=2)
    found = stand.say(ahead, turns=1) + stand.say(plain(2, 3))
    assert len(found) == 10 and is_plain_text(found)


def test_the_first_token_tells_of_memory_and_what_was_held_before_the_request_does_not_count() -> None:
    mx.eval(mx.zeros((64, 1 << 20)))
    stand = Stand()
    assert 0 < stand.link.sent[0].peak_bytes < 1 << 20
