"""Messages that arrive together are answered together: first to workers, then to the front."""

from __future__ import annotations

from msgspec.structs import replace

from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import (
    Admit,
    Committed,
    RequestBegan,
    RequestEnded,
    ToFront,
)
from outrider.protocol.messages import (
    Abilities,
    Close,
    DraftTokens,
    Message,
    Outcome,
    Span,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from tests.fake_workers import FakeWorkers
from tests.harness.settings import round_settings

REQUESTS = ("a", "b", "c")


class RecordingWorkers(FakeWorkers):
    """A target and no drafter. Records the messages to the target and the events to the front in one list."""

    target_context = 10_000
    target_abilities = Abilities()

    def __init__(self) -> None:
        self.sent: list[Message | ToFront | str] = []

    def notes(self) -> list[str]:
        return []

    def drafters(self) -> set[str]:
        return set()

    def send_target(self, message: Message) -> None:
        self.sent.append(message)

    def send_worker(self, name: str, message: Message) -> None:
        raise AssertionError("there is no drafter")

    def flush_and_yield(self) -> None:
        self.sent.append("flush")


def open_requests(max_tokens: int) -> tuple[Scheduler, RecordingWorkers]:
    """Returns a scheduler with three open requests, and its workers."""
    workers = RecordingWorkers()
    scheduler = Scheduler(workers, round_settings(4, 8, ngrams=False), workers.sent.append, Trace(None))
    for request in REQUESTS:
        scheduler.begin(Admit(request, (1, 2, 3), SamplingParams(max_tokens=max_tokens), "ar", frozenset()), 0)
    workers.sent.clear()
    return scheduler, workers


def outcome(request: str) -> Outcome:
    return Outcome(request=request, epoch=0, round=0, base_len=3, accepted=0, bonus=5, work=Span(0, 1))


def test_all_verifies_are_sent_before_any_committed_event() -> None:
    scheduler, workers = open_requests(9)
    scheduler.handle([("target-0", outcome(request)) for request in REQUESTS], 1)
    kinds = [type(sent) if sent != "flush" else sent for sent in workers.sent]
    assert kinds == [Verify] * 3 + ["flush"] + [Committed] * 3
    assert [sent.request for sent in workers.sent if not isinstance(sent, str)] == [*REQUESTS, *REQUESTS]  # type: ignore[union-attr]


def test_duplicate_outcome_in_one_batch_counts_once() -> None:
    for max_tokens in (1, 9):
        scheduler, workers = open_requests(max_tokens)
        scheduler.handle([("target-0", outcome("a"))] * 2, 1)
        assert [sent for sent in workers.sent if isinstance(sent, Committed)] == [Committed("a", (5,))]
        assert scheduler.stale == 1
        ended = [sent.timings.predicted_n for sent in workers.sent if isinstance(sent, RequestEnded)]
        assert ended == ([1] if max_tokens == 1 else [])
        assert (Close("a") in workers.sent) == (max_tokens == 1)


def test_plain_outcomes_in_one_batch_do_not_affect_time_estimates() -> None:
    scheduler, workers = open_requests(9)
    following = [replace(outcome("a"), round=n, base_len=3 + n, next_proposal=DraftTokens()) for n in (1, 2)]
    scheduler.handle([("target-0", sent) for sent in (outcome("a"), *following)], 1)
    assert [sent.tokens for sent in workers.sent if isinstance(sent, Committed)] == [(5,), (5,), (5,)]
    scheduler.begin(Admit("d", (1, 2, 3), SamplingParams(), "auto", frozenset()), 1)
    assert workers.sent[-1] == RequestBegan("d", "auto")
