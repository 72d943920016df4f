"""Two halves of SD's requests alternate if that is faster, and none waits for a half that has ended."""

from __future__ import annotations

import pytest

from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.next_round import Alternation
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.request import RoundSettings
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import Admit, RequestEnded, ToFront
from outrider.protocol.messages import Abilities, Commit, Drafted, Message, Outcome, Span, Verify
from outrider.protocol.sampling import SamplingParams
from tests.honest import HonestWorkers

MS = 1_000_000
DEPTH = 3


class Wires(HonestWorkers):
    """A target and a drafter that say what the test says."""

    target_context = 10_000
    target_abilities = Abilities()

    def __init__(self) -> None:
        self.target: list[Message] = []
        self.drafter: list[Message] = []

    def notes(self) -> list[str]:
        return []

    def is_target(self, name: str) -> bool:
        return name == "target-0"

    def drafters(self) -> set[str]:
        return {"draft-0"}

    def send_target(self, message: Message) -> None:
        self.target.append(message)

    def send_worker(self, name: str, message: Message) -> None:
        self.drafter.append(message)

    def flush_and_yield(self) -> None:
        """Nothing waits for anything here."""


class Play:
    """Requests in SD; the target verifies all that it was told to in one forward of `row_ms` a row."""

    def __init__(self, requests: int, row_ms: float, draft_ms: float, max_tokens: int = 12) -> None:
        self.wires, self.front, self.now = Wires(), list[ToFront](), 0
        self.rounds = Scheduler(self.wires, RoundSettings(DEPTH, 8, ngrams=False), self.front.append, Trace(None))
        self._row_ms, self._draft_ms = row_ms, draft_ms
        self.forwards: list[list[str]] = []
        for rows in (4, 4 * requests):
            self.rounds._planner.estimates.observe_verify(rows, 1.0 + row_ms * rows, 4)
        self.rounds._planner.estimates.observe_draft(DEPTH, draft_ms)
        for name in "abcd"[:requests]:
            sampling = SamplingParams(max_tokens=max_tokens)
            self.rounds.begin(Admit(name, (1, 2, 3), sampling, "sd", frozenset()), 0)
        names = "abcd"[:requests]
        self.say("target-0", 1.0, *(Outcome(name, 0, 0, 3, 0, 5, Span(0, MS)) for name in names))

    def say(self, sender: str, took_ms: float, *messages: Message) -> None:
        self.now += int(took_ms * MS) + 1
        self.rounds.handle_all([(sender, message) for message in messages], self.now)

    def drafted(self) -> None:
        """All that the drafter was asked for comes at once."""
        asked = [m for m in self.wires.drafter if isinstance(m, Commit) and m.verifying is None]
        self.wires.drafter.clear()
        span = Span(0, int(self._draft_ms * MS))
        chains = (Drafted(m.request, m.epoch, m.round, m.base_len, (7,) * m.depth, span) for m in asked)
        self.say("draft-0", self._draft_ms, *chains)

    def verified(self) -> None:
        """One forward over all that the target was told to verify."""
        told = [m for m in self.wires.target if isinstance(m, Verify)]
        self.wires.target.clear()
        self.forwards.append(sorted(m.request for m in told))
        rows = sum(len(m.chain) + 1 for m in told)
        took_ms = 1.0 + self._row_ms * rows
        span = Span(0, int(took_ms * MS))
        held = ((m, min(len(m.chain), 1)) for m in told)
        found = (Outcome(m.request, 0, m.round, m.base_len, k, 6, span, rows=rows) for m, k in held)
        self.say("target-0", took_ms, *found)

    def to_the_end(self) -> None:
        for _ in range(60):
            if not self.rounds.active:
                return
            self.verified()
            self.drafted()
        raise AssertionError("a request hangs")


def test_halves_take_turns_where_rows_are_dear_and_drafts_slow() -> None:
    play = Play(4, row_ms=5.0, draft_ms=40.0)
    play.drafted()
    play.to_the_end()
    assert len(play.forwards[0]) == 2 and sorted([*play.forwards[0], *play.forwards[1]]) == list("abcd")
    assert all(len(members) == 2 for members in play.forwards[:-2])  # a text's last token needs no draft
    assert [event.reason for event in play.front if isinstance(event, RequestEnded)] == ["length"] * 4


@pytest.mark.parametrize(("row_ms", "draft_ms"), [(0.01, 0.5), (5.0, 0.5)])
def test_all_go_together_where_that_is_quicker(row_ms: float, draft_ms: float) -> None:
    play = Play(4, row_ms, draft_ms)
    play.drafted()
    play.to_the_end()
    assert play.forwards[0] == list("abcd")


@pytest.mark.parametrize("goes", ["stop", "late"])
def test_nobody_waits_for_a_half_that_has_gone_or_is_silent(goes: str) -> None:
    play = Play(2, row_ms=5.0, draft_ms=40.0)
    play.drafted()
    first = [m.request for m in play.wires.target if isinstance(m, Verify)]
    assert len(first) == 1
    play.wires.target.clear()
    if goes == "stop":
        play.rounds.stop(first[0], "cancelled")
    deadline = play.rounds.next_deadline_ns()
    assert deadline is not None
    play.rounds.on_time(deadline)
    (other,) = [m for m in play.wires.target if isinstance(m, Verify)]
    assert other.request != first[0] and len(other.chain) == DEPTH


def test_nobody_waits_for_a_half_of_which_somebody_is_always_under_way() -> None:
    """Each goes on as soon as it can, so that the forwards of a half need not hold all of it."""
    play = Play(4, row_ms=5.0, draft_ms=40.0)
    play.drafted()
    first, *_ = told = [m for m in play.wires.target if isinstance(m, Verify)]
    assert len(told) == 2
    play.wires.target.clear()
    play.say("target-0", 20.0, Outcome(first.request, 0, first.round, first.base_len, 1, 6, Span(0, MS), rows=4))
    others = {m.request for m in play.wires.target if isinstance(m, Verify)}
    assert others == set("abcd") - {m.request for m in told}


def test_a_target_that_is_lost_takes_what_was_held_with_it() -> None:
    play = Play(2, row_ms=5.0, draft_ms=40.0)
    play.drafted()
    play.rounds.on_target_lost("gone", False)
    assert all(request.held is None for request in play.rounds._requests.values())


def test_one_alone_never_alternates() -> None:
    estimates = Estimates()
    estimates.observe_draft(DEPTH, 100.0)
    assert not Alternation(estimates).pays(1, DEPTH)
