"""A probe finds within its minute what pays, also on a slow machine and with a useless draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from outrider.bench.timing.forecast import forecasts, recommendation
from outrider.bench.timing.probe import SECONDS, Probe, TimeBudget, probe
from outrider.bench.timing.workbench import ParallelRound
from outrider.protocol import clock
from outrider.protocol.messages import Branch, Branches, Drafted, Outcome, Span
from outrider.protocol.sampling import SamplingParams

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8), (9,)]
SAMPLING = SamplingParams()


@dataclass
class Machine:
    """A workbench in virtual time; the target generates 0, 1, 2, ... and the draft is always or never right."""

    verify_ms: float
    step_ms: float
    right: bool
    now_ns: int = 1

    def _work(self, milliseconds: float) -> Span:
        started = self.now_ns
        self.now_ns += int(milliseconds * 1e6)
        return Span(started, self.now_ns)

    def need_drafter(self) -> None: ...

    def open(self, *_: Any, **__: Any) -> None:
        self._work(self.verify_ms)

    def close(self) -> None: ...

    def text(self, prompt: Sequence[int], length: int, _: SamplingParams) -> tuple[tuple[int, ...], list[Span]]:
        spans = [self._work(self.verify_ms) for _ in range(length)]
        return (*prompt, *range(length)), spans

    def verify(self, number: int, base_len: int, chain: Sequence[int]) -> Outcome:
        work = self._work(self.verify_ms * (1 + 0.05 * len(chain)))
        return Outcome("bench", 0, number, base_len, len(chain), 0, work)

    def chain(self, number: int, base_len: int, new: Sequence[int], depth: int) -> tuple[Drafted, float]:
        self.after = new[-1] if new else 0
        work = self._work(self.step_ms * depth)
        return Drafted("bench", 0, number, base_len, self._drafted(depth), work), self.step_ms * depth

    def work_ahead(self, *_: Any) -> tuple[list[Branch], list[Span]]:
        return [], [self._work(self.step_ms) for _ in range(4)]

    def both(
        self, number: int, base_len: int, new: Sequence[int], chain: Sequence[int], depth: int, branches: int
    ) -> ParallelRound:
        self.after = new[-1] if new else 0
        work = self._work(self.verify_ms * (1 + 0.05 * len(chain)))
        accepted = len(chain) if self.right else 0
        self.after += accepted + 1
        bonus = self.after
        entry = Branch((*chain[:accepted], bonus if self.right else 999), self._drafted(depth))
        piece = Branches("bench", 0, number, base_len, depth, (entry,), Span(work.started_ns, work.ended_ns), True)
        return ParallelRound(Outcome("bench", 0, number, base_len, accepted, bonus, work), (piece,))

    def _drafted(self, depth: int) -> tuple[int, ...]:
        return tuple(self.after + 1 + i if self.right else 998 for i in range(depth))


def probed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> tuple[Probe, float]:
    """Returns the probe, and the seconds it took."""
    monkeypatch.setattr(clock, "now", lambda: machine.now_ns)
    found = probe(cast(Any, machine), PROMPTS, SAMPLING, (2, 3, 4, 6), (4, 8, 16), lambda _: None)
    return found, machine.now_ns / 1e9


@pytest.mark.parametrize("verify_ms", [10.0, 30.0, 100.0])
def test_a_draft_that_is_never_accepted_is_recognised_within_a_minute(
    verify_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seconds = probed(Machine(verify_ms, 0.4 * verify_ms, right=False), monkeypatch)
    assert seconds < 1.25 * SECONDS
    assert len(found.rehearsals) == 1
    assert recommendation(forecasts(found, 0.3)).mode == "ar"


@pytest.mark.parametrize("verify_ms", [1.0, 10.0, 30.0, 100.0])
def test_a_draft_that_is_always_accepted_is_tried_with_every_k_and_b(
    verify_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seconds = probed(Machine(verify_ms, 0.1 * verify_ms, right=True), monkeypatch)
    assert seconds < 1.25 * SECONDS
    assert {(t.depth, t.branches) for t in found.rehearsals} == {(k, b) for k in (2, 3, 4, 6) for b in (4, 8, 16)}
    assert all(t.acceptance(0) == 1.0 for t in found.rehearsals)
    assert recommendation(forecasts(found, 0.3)).mode == "ssd"


def test_turns_end_with_their_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(clock, "now", lambda: next(seconds) * 1_000_000_000)
    glass = TimeBudget(10.0)

    def count(turns: Iterator[int]) -> int:
        return sum(1 for _ in turns)

    assert count(glass.turns(20, 0, 0.5)) == 4
    assert count(glass.turns(20, 3, 0.5)) == 3
    assert count(glass.turns(2, 0, 5.0)) == 2
