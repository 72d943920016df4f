"""The gate chooses a kind of engine: the least busy one, or that of the session."""

from __future__ import annotations

from contextlib import ExitStack

from outrider.fleet.engine_selector import MISSED_SECONDS, EngineSelector

NAMES = [f"session {number}" for number in range(60)]


class Clock:
    at = 100.0

    def __call__(self) -> float:
        return self.at


def test_a_text_without_a_session_goes_to_the_kind_with_least_load_per_engine() -> None:
    turns, chosen = EngineSelector((2, 1)), list[int]()
    with ExitStack() as stack:
        for _ in range(6):
            chosen.append(turns.choose(""))
            stack.enter_context(turns.under_way(chosen[-1]))
    assert sorted(chosen) == [0, 0, 0, 0, 1, 1]
    assert turns.choose("") == 0


def test_sessions_are_spread_by_how_many_engines_there_are_and_alike_at_all_gates() -> None:
    kinds = [EngineSelector((2, 1)).choose(name) for name in NAMES]
    assert kinds == [EngineSelector((2, 1)).choose(name) for name in NAMES]
    assert 0 < sum(kinds) < len(NAMES) / 2


def test_a_kind_whose_last_engine_is_lost_is_left_out_for_a_while() -> None:
    clock = Clock()
    turns = EngineSelector((2, 1), clock)
    before = [turns.choose(name) for name in NAMES]
    turns.lost(1, "one")
    assert {turns.choose(name) for name in ["", *NAMES]} == {0}
    clock.at += MISSED_SECONDS + 1
    assert [turns.choose(name) for name in NAMES] == before


def test_repeated_losses_of_one_engine_count_as_one() -> None:
    turns = EngineSelector((2, 1))
    before = [turns.choose(name) for name in NAMES]
    for _ in range(4):
        turns.lost(0, "one")
    assert [turns.choose(name) for name in NAMES] == before
    turns.lost(0, "other")
    assert {turns.choose(name) for name in ["", *NAMES]} == {1}


def test_a_kind_that_does_not_answer_is_passed_over_unless_there_is_no_other() -> None:
    turns = EngineSelector((2, 1))
    turns.silent(0)
    assert {turns.choose(name) for name in ["", *NAMES]} == {1}
    turns.silent(1)
    assert {turns.choose(name) for name in NAMES} == {0, 1}
