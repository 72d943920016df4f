"""A target with an in-process drafter: its messages, and how its rounds change the estimates and the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest

from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import Admit, Committed, RequestEnded
from outrider.protocol.messages import (
    Abilities,
    Autonomous,
    Close,
    DraftTokens,
    Halt,
    InProcessDraft,
    InProcessDrafter,
    Outcome,
    Span,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Origin
from tests.fake_workers import FakeWorkers
from tests.harness.settings import round_settings

MS = 1_000_000


class Target(FakeWorkers):
    """A target that accepts `accepted` tokens of every chain.

    Drafting a token takes 2 ms, and a verify 10 ms plus `row_ms` per chain token. `lengths` are the maximum lengths of
    successive chains, repeated.
    """

    target_context = 1000

    def __init__(
        self,
        accepted: int,
        ngrams: bool = False,
        drafter: str = "draft",
        row_ms: int = 1,
        lengths: Sequence[int] = (12,),
    ) -> None:
        self._row_ms, self._lengths = row_ms, cycle(lengths)
        named = drafter == "ngram"
        self.target_abilities = Abilities(ngrams=named, drafters=() if named else (InProcessDrafter(drafter),))
        self.sent: list[Any] = []
        self.events: list[Any] = []
        self.accepted = accepted
        settings = round_settings(4, 8, ngrams=ngrams)
        self.trace = RecordingTrace()
        self.rounds = Scheduler(self, settings, self.events.append, self.trace)
        self._now, self._next = 0, 100

    def notes(self) -> list[str]:
        return []

    def drafters(self) -> set[str]:
        return set()

    def send_target(self, message: Any) -> None:
        self.sent.append(message)

    def send_worker(self, name: str, message: Any) -> None:
        raise AssertionError("there is no draft worker")

    def flush_and_yield(self) -> None:
        """Does nothing: no message is buffered."""

    def run(
        self, max_tokens: int, mode: str = "sd", eos: frozenset[int] = frozenset(), origins: bool = False
    ) -> RequestEnded:
        self.sent.clear()
        sampling = SamplingParams(max_tokens=max_tokens)
        self.rounds.begin(Admit("r", (1, 2, 3), sampling, mode, eos, origins=origins), self._now)
        self._answer(0, 3, 0, 0)
        for _ in range(1000):
            if not self.rounds.active:
                return next(event for event in reversed(self.events) if isinstance(event, RequestEnded))
            self._answer_verify([message for message in self.sent if isinstance(message, Verify)][-1])
        raise TimeoutError("the request hangs")

    def _answer_verify(self, verify: Verify) -> None:
        base_len, number, room = (
            verify.base_len,
            verify.round,
            getattr(verify.proposal, "max_tokens", len(verify.chain) + 1),
        )
        more = True
        while more:
            halted = isinstance(self.sent[-1], Halt)
            most = next(self._lengths)
            depth = min(verify.draft.depth, room - 1, most) if verify.draft else len(verify.chain)
            accepted = min(self.accepted, depth) if verify.draft else 0
            more = verify.autonomous and not halted and room > accepted + 1
            self._answer(number, base_len, depth, accepted, bool(verify.draft), DraftTokens() if more else None)
            base_len, number, room = base_len + accepted + 1, number + 1, room - accepted - 1
            if isinstance(self.sent[-1], Close):
                return

    def _answer(
        self, number: int, base_len: int, depth: int, accepted: int, own: bool = False, next_proposal: Any = None
    ) -> None:
        drafted = self._now + (2 * MS * depth if own else 0)
        ended = drafted + (10 + self._row_ms * depth) * MS
        chain = tuple(self._next + i for i in range(depth))
        self._next += accepted + 1
        outcome = Outcome(
            "r", 0, number, base_len, accepted, self._next - 1, Span(drafted, ended), drafted - self._now,
            next_proposal, drafted=InProcessDraft(chain, span=Span(self._now, drafted)) if own else None,
        )  # fmt: skip
        self._now = ended
        self.rounds.handle([("target-0", outcome)], self._now)


class RecordingTrace(Trace):
    def __init__(self) -> None:
        super().__init__(None)
        self.names: list[tuple[str, str]] = []

    @property
    def enabled(self) -> bool:
        return True

    def add(self, track: str, name: str, span: Span, **args: Any) -> None:
        self.names.append((track, name))


def test_one_verify_covers_the_whole_request_with_its_token_limit() -> None:
    target = Target(accepted=2)
    target.run(60)
    (verify,) = [message for message in target.sent if isinstance(message, Verify)]
    assert verify.proposal == Autonomous(59, verify.draft) and verify.draft is not None and verify.draft.depth == 4


@pytest.mark.parametrize(("max_tokens", "rounds"), [(61, 20), (62, 21), (63, 21)])
def test_drafted_and_accepted_tokens_are_counted(max_tokens: int, rounds: int) -> None:
    """After the first token, each round has three tokens; the last one is cut to `max_tokens`."""
    times = Target(accepted=2).run(max_tokens).timings
    assert times.predicted_n == max_tokens
    assert times.rounds == rounds + 1
    left = max_tokens - 1 - 3 * (rounds - 1)
    last = [min(4, 3 * (rounds - i) - 3 + left - 1) for i in range(rounds)]
    assert times.draft_n == sum(last)
    assert times.draft_n_accepted == sum(min(2, n) for n in last)
    assert times.accepted_by_position[2:] == (0, 0)
    assert (times.cache_hits, times.cache_misses, times.draft_waits) == (0, 0, 0)


def test_in_process_chain_tokens_have_origin_drafted() -> None:
    target = Target(accepted=2)
    times = target.run(61, origins=True).timings
    found = [o for event in target.events if isinstance(event, Committed) for o in event.origins or ()]
    assert found == [Origin.TARGET, *[Origin.DRAFTED, Origin.DRAFTED, Origin.TARGET] * 20]
    assert times.draft_n_accepted == 40


def test_target_looks_ngrams_up_by_itself_and_gets_the_measured_costs_of_rows() -> None:
    target = Target(accepted=1, ngrams=True, drafter="ngram", row_ms=4, lengths=(1, 2, 0))
    times = target.run(200, origins=True).timings
    drafts = [message.draft for message in target.sent if isinstance(message, Verify)]
    assert 2 <= len(drafts) < times.rounds / 10
    assert all(draft is not None and draft.drafter == "ngram" for draft in drafts)
    first, last = (draft.row_costs[2] for draft in (drafts[0], drafts[-1]) if draft is not None)
    assert last > 2 * first > 0
    found = [o for event in target.events if isinstance(event, Committed) for o in event.origins or ()]
    assert found[:3] == [Origin.TARGET, Origin.COPIED, Origin.TARGET]
    assert times.draft_n_accepted == found.count(Origin.COPIED) and not times.draft_n_accepted_by


def test_target_looks_up_no_ngrams_unless_requested() -> None:
    target = Target(accepted=2, ngrams=False, drafter="ngram")
    target.run(20)
    assert all(message.draft is None for message in target.sent if isinstance(message, Verify))


def test_tokens_past_the_end_are_not_counted() -> None:
    target = Target(accepted=4)
    ended = target.run(60, eos=frozenset({103}))
    # 100 | 101 102 103 ... : of the first chain, 101 to 103 count, and no bonus token follows
    assert (ended.reason, ended.timings.predicted_n) == ("eos", 4)
    assert (ended.timings.draft_n, ended.timings.draft_n_accepted) == (3, 3)


def test_draft_and_verify_costs_are_learned_separately() -> None:
    target = Target(accepted=2)
    target.run(60)
    estimates = target.rounds._planner.estimates
    assert estimates.draft_ms(4, "draft") == pytest.approx(8.0)
    assert estimates.verify_ms(5) == pytest.approx(14.0)
    acceptance = estimates.acceptance_of("draft")
    assert acceptance.rate(0) > 0.9 > 0.4 > acceptance.rate(2)


def test_verify_time_excludes_drafting() -> None:
    times = Target(accepted=4).run(51).timings
    assert (times.verify_ms, times.idle_ms) == (10 * 14.0, 10 * 8.0)


def test_auto_chooses_between_plain_decoding_and_in_process_chains() -> None:
    good, bad = Target(accepted=4), Target(accepted=0)
    for target in (good, bad):
        for _ in range(12):
            target.run(100, "auto")
    drafts = [message.draft for message in good.sent if isinstance(message, Verify)]
    assert sum(draft is not None for draft in drafts) > 0.8 * len(drafts)
    assert sum(message.draft is not None for message in bad.sent if isinstance(message, Verify)) <= 1


def test_trace_has_each_chain_with_its_drafting() -> None:
    target = Target(accepted=2)
    target.run(59)
    tracks = [track for track, name in target.trace.names if name == "chain"]
    assert tracks == ["target's drafter"] * 20
    assert (
        target.trace.names.count(("orchestrator", "drafted")) == 19
    )  # the last round has room for its bonus token only
