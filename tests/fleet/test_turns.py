"""The ingress selects a kind of engine (attached or placed): the least loaded one, or that of the session."""

from __future__ import annotations

from contextlib import ExitStack

from outrider.fleet.engine_selector import LOST_ENGINE_SECONDS, EngineSelector

NAMES = [f"session {number}" for number in range(60)]


class Clock:
    at = 100.0

    def __call__(self) -> float:
        return self.at


def test_request_without_a_session_goes_to_the_least_loaded_kind() -> None:
    selector, chosen = EngineSelector((2, 1)), list[int]()
    with ExitStack() as stack:
        for _ in range(6):
            chosen.append(selector.choose(""))
            stack.enter_context(selector.under_way(chosen[-1]))
    assert sorted(chosen) == [0, 0, 0, 0, 1, 1]
    assert selector.choose("") == 0


def test_sessions_are_spread_by_engine_count_and_equally_at_all_ingresses() -> None:
    kinds = [EngineSelector((2, 1)).choose(name) for name in NAMES]
    assert kinds == [EngineSelector((2, 1)).choose(name) for name in NAMES]
    assert 0 < sum(kinds) < len(NAMES) / 2


def test_a_kind_whose_last_engine_is_lost_is_left_out_for_a_while() -> None:
    clock = Clock()
    selector = EngineSelector((2, 1), clock)
    before = [selector.choose(name) for name in NAMES]
    selector.mark_lost(1, "one")
    assert {selector.choose(name) for name in ["", *NAMES]} == {0}
    clock.at += LOST_ENGINE_SECONDS + 1
    assert [selector.choose(name) for name in NAMES] == before


def test_repeated_losses_of_one_engine_count_as_one() -> None:
    selector = EngineSelector((2, 1))
    before = [selector.choose(name) for name in NAMES]
    for _ in range(4):
        selector.mark_lost(0, "one")
    assert [selector.choose(name) for name in NAMES] == before
    selector.mark_lost(0, "other")
    assert {selector.choose(name) for name in ["", *NAMES]} == {1}


def test_unresponsive_kind_is_skipped_unless_all_are_unresponsive() -> None:
    selector = EngineSelector((2, 1))
    selector.mark_silent(0)
    assert {selector.choose(name) for name in ["", *NAMES]} == {1}
    selector.mark_silent(1)
    assert {selector.choose(name) for name in NAMES} == {0, 1}
