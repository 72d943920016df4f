"""What a drafter could bring at most: the best of its drafts' lengths and sizes for their time, whoever pays that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from outrider.bench.bound.report import Row, judged, verdict
from outrider.bench.bound.times import ALL, ALONE, ONE, ROWS, Times, verify_times
from outrider.bench.bound.ways import FORMS, Brought, Seating, best, seatings, ways_of
from outrider.bench.contest.statistics import Interval, Timed, total_rate
from outrider.bench.timing.curve import Curve
from outrider.bench.tree_rounds import Found, Way
from outrider.protocol.messages import Span
from outrider.protocol.sampling import SamplingParams

HEAD = "mtp"
COSTS = {
    ALONE: Curve(((1, 10.0), (11, 20.0))),  # a row more takes a millisecond
    ONE: Curve(((1, 11.0), (11, 22.0))),
    ALL: Curve(((1, 12.0), (11, 24.0))),
}
TIMES = [Times(COSTS, {HEAD: Curve(((1, 3.0), (3, 9.0)))})]
SHORT, LONG = replace(Way("chain"), depth=1, most=1), replace(Way("chain"), depth=5, most=5)
FOUND = {
    SHORT: (Found(rounds=10, tokens=16, nodes=10, rows=Counter({2: 10})),),
    LONG: (Found(rounds=10, tokens=24, nodes=50, rows=Counter({6: 10})),),
}


def test_free_drafts_are_as_long_as_rows_allow() -> None:
    found = best(FOUND, TIMES, ALONE, ())
    assert found.depth == 5
    assert total_rate(found.timed) == pytest.approx(2.4 / 0.015)
    assert (found.per_verify, found.rows) == (2.4, 6.0)


def test_beside_a_drafter_a_verify_takes_what_it_takes_there() -> None:
    assert total_rate(best(FOUND, TIMES, ALL, ()).timed) == pytest.approx(2.4 / 0.018)


def test_what_drafting_in_the_targets_process_takes_is_counted_token_by_token() -> None:
    found = best(FOUND, TIMES, ALONE, (HEAD,))
    assert found.depth == 1
    assert total_rate(found.timed) == pytest.approx(1.6 / 0.014)


def test_who_says_a_single_token_is_paid_for_one() -> None:
    brief = {replace(way, brief=(HEAD,)): found for way, found in FOUND.items()}
    found = best(brief, TIMES, ALL, (HEAD,))
    assert found.depth == 5
    assert total_rate(found.timed) == pytest.approx(2.4 / 0.021)


def test_a_worker_works_beside_the_verify_unless_all_draft_in_the_targets_process() -> None:
    assert [one.has_worker for one in seatings(HEAD)] == [True, False, True, False, True, True]
    joint = next(one for one in seatings(HEAD) if one.own and one.has_worker)
    assert {way.brief for way in ways_of(joint, FORMS[0], COSTS[ALL])} == {(), (HEAD,)}
    alone = Seating("head", (HEAD,), (HEAD,))
    assert {way.brief for way in ways_of(alone, FORMS[0], COSTS[ALL])} == {()}


@dataclass
class Bench:
    """A workbench whose forwards take no time; the target says 0, 1, 2, ..."""

    asked: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    told: int = 0

    def text(self, prompt: Sequence[int], length: int, _: SamplingParams) -> tuple[tuple[int, ...], list[Span]]:
        return (*prompt, *range(length)), []

    def open(self, tokens: Sequence[int], *_: Any, **__: Any) -> None:
        self.told = len(tokens)

    def close(self) -> None: ...

    def verify(self, number: int, at: int, chain: Sequence[int]) -> Any:
        self.asked.append((ALONE, at, tuple(chain)))
        return _outcome(chain)

    def both(self, number: int, at: int, new: Sequence[int], chain: Sequence[int], depth: int, branches: int) -> Any:
        assert len(new) == at - self.told
        self.told = at
        self.asked.append((branches, at, tuple(chain)))
        return type("Both", (), {"outcome": _outcome(chain)})


def _outcome(chain: Sequence[int]) -> Any:
    return type("Outcome", (), {"accepted": len(chain), "work": Span(0, 1_000_000)})


def test_a_verify_is_timed_alone_and_beside_drafters_over_chains_that_hold() -> None:
    bench = Bench()
    found = verify_times(cast("Any", bench), (7, 7, 7), SamplingParams())
    assert {branches: curve.points for branches, curve in found.items()} == dict.fromkeys(
        (ALONE, ONE, ALL), tuple((rows, 1.0) for rows in ROWS)
    )
    assert {kind for kind, _, _ in bench.asked} == {ALONE, ONE, ALL}
    for _, at, chain in bench.asked:
        assert chain == tuple(range(at - 3, at - 3 + len(chain)))


def test_what_is_out_of_reach_is_said() -> None:
    def brought(tokens: int) -> Brought:
        return Brought((Timed(tokens, 1.0), Timed(tokens, 1.0)), 2.0, 3.0, 2)

    today = [Timed(100, 1.0), Timed(100, 1.0)]
    rows = [
        Row("one", False, brought(110), brought(130), brought(140)),
        Row("other", False, brought(90), brought(90), brought(150)),
        Row("third", True, brought(170), brought(180), brought(190)),
    ]
    counted, least, free, foreseeing, as_today = verdict(rows, today)
    assert "1.10" in counted
    assert "by one: 1.15 times is out of reach" in counted
    assert "by one: 1.15 times is not forbidden" in least
    assert "by other" in free
    assert "by third" in foreseeing
    assert "1.55" in as_today  # 170 of the 110 that today's drafter would bring without misses and gaps
    assert "neither" in judged(Interval(1.16, 1.1, 1.2))
