"""What tune measures of drafters in the target's process, from the rounds of a scripted server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.bench.commands import tune_heads
from outrider.bench.commands.tune_heads import PLAIN, MeasuredHead, best_of_each, measure
from outrider.orchestrator.cli import main
from outrider.orchestrator.core.policy import tuning
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.messages import DraftWork, RoundRecord, Span, Timings
from outrider.protocol.sampling import SamplingParams

MS = 1_000_000


class Played:
    """Ten rounds of K tokens, of which `held` are accepted; drafting takes 2 ms per token, a verify 10 ms."""

    def __init__(self, held: dict[str, int]) -> None:
        self._held = held

    def stream(self, text: Any, sampling: Any, *, num_draft_tokens: int = 0, drafter: str = "", **others: Any) -> Any:
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
                yield SimpleNamespace(rounds=(record, record))

        return Stream()


WAYS = [PLAIN, *(Arm("sd", depth, drafter=name) for name in ("eagle3", "mtp", "silent") for depth in (1, 2, 4))]


@pytest.fixture(scope="module")
def found() -> dict[Arm, MeasuredHead]:
    client: Any = Played({"eagle3": 2, "mtp": 0})
    return measure(client, WAYS, [(1,), (2,)], SamplingParams(), lambda said: None)


def test_each_drafters_best_depth_and_costs_are_found(found: dict[Arm, MeasuredHead]) -> None:
    best = best_of_each(found)
    assert [(one.choice.drafter, one.choice.depth, one.choice.measured) for one in best] == [
        ("eagle3", 2, True), ("mtp", 1, True),
    ]  # fmt: skip
    assert best[0].choice.tokens_per_second == pytest.approx(1000 * 3 / 14)
    assert (best[0].known.step_ms, best[0].known.acceptance) == (2.0, (1.0, 1.0, 0.0))
    assert best[1].known.acceptance == (0.0,)


def test_a_head_alone_is_compared_with_plain_decoding(
    found: dict[Arm, MeasuredHead],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`auto` of the next server begins with the result, for the drafter that was measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[Arm] = []
    monkeypatch.setattr(tune_heads, "_measured", lambda options, ways, *others: asked.extend(ways) or found)
    assert main(["tune", "--draft-backend", "mtp", "--temp", "0.8"]) == 0
    assert asked[0] == PLAIN and {way.drafter for way in asked[1:]} == {"mtp"}
    said = capsys.readouterr().out
    assert "ar: 100.0 tok/s" in said and "recommended: --mode sd --num-draft-tokens 2" in said
    (record,) = tuning.load(tuning.path_for(choose_pair(ServeSettings(draft_backend="mtp")).settings))
    assert [(one.mode, one.drafter, one.depth) for one in record.choices] == [
        ("sd", "eagle3", 2), ("ar", "", 0), ("sd", "mtp", 1),
    ]  # fmt: skip
    assert record.step_ms == pytest.approx(10) and record.verify_ms == ((1, 10), (2, 10), (3, 10), (5, 10))
    assert {own.name: own.step_ms for own in record.own} == {"eagle3": 2, "mtp": 2} and record.temp == 0.8
