"""What tune finds out of drafters in the target's process, from the rounds of a server that is played."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.contest.statistics import Timed
from outrider.bench.drafters import report
from outrider.bench.timing.heads import measure
from outrider.protocol.messages import DraftWork, RoundRecord, Span, Timings
from outrider.protocol.sampling import SamplingParams

MS = 1_000_000


class Played:
    """Ten rounds of K tokens, of which `held` hold; drafting takes 2 ms a token, a verify 10 ms."""

    def __init__(self, held: dict[str, int]) -> None:
        self._held = held

    def stream(self, text: Any, sampling: Any, *, num_draft_tokens: int, drafter: str, **others: Any) -> Any:
        depth = num_draft_tokens if drafter in self._held else 0
        held = min(self._held.get(drafter, 0), depth)
        work = Span(0, 2 * MS * depth)
        drafting = (DraftWork(drafter, 1, depth, 0, work),) if depth else ()
        record = RoundRecord(1, "none", "head", depth, held, held + 1, Span(0, 10 * MS), drafting=drafting)
        timings = Timings(
            predicted_n=10 * (held + 1) + 1,
            predicted_ms=10 * (10.0 + 2 * depth),
            accepted_by_position=tuple(10 * (i < held) for i in range(depth)),
            drafted_by_position=(10,) * depth,
        )

        class Stream:
            result = SimpleNamespace(timings=timings)

            def __iter__(self) -> Iterator[Any]:
                yield SimpleNamespace(rounds=(record,))

        return Stream()


def test_each_drafters_best_depth_and_costs_are_found() -> None:
    client: Any = Played({"eagle3": 2, "mtp": 0})
    found = list(measure(client, ["eagle3", "mtp", "silent"], [(1,)], SamplingParams(), (1, 2, 4), lambda said: None))
    assert [(one.choice.drafter, one.choice.depth, one.choice.measured) for one in found] == [
        ("eagle3", 2, True), ("mtp", 1, True),
    ]  # fmt: skip
    assert found[0].choice.tokens_per_second == pytest.approx(1000 * 3 / 14)
    assert (found[0].known.step_ms, found[0].known.acceptance) == (2.0, (1.0, 1.0, 0.0))
    assert found[1].known.acceptance == (0.0,)


def test_auto_is_held_against_the_best_of_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"auto": [Timed(95, 1.0)] * 4, "ar": [Timed(50, 1.0)] * 4, "sd by eagle3": [Timed(100, 1.0)] * 4}
    assert report("code", times).value == pytest.approx(0.95)
    assert "auto / sd by eagle3: 0.95" in capsys.readouterr().out
