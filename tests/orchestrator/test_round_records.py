"""The rounds that a request reports: each chain's source, the work, and the waits."""

from __future__ import annotations

from outrider.orchestrator.core.metrics import RequestMetrics
from outrider.orchestrator.core.proposal import Lookup, Proposal
from outrider.protocol.codec import encode
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import (
    Branch,
    Branches,
    Drafted,
    DraftWork,
    InProcess,
    InProcessDraft,
    Outcome,
    RoundRecord,
    Span,
    TextChunk,
)
from outrider.protocol.schema import MAX_ITEMS, Origin
from tests.orchestrator.rounds import make_settled_round

BEGAN = 1_000


def outcome(number: int, accepted: int, work: Span, **more: object) -> Outcome:
    return Outcome("r", 0, number, 5, accepted, 7, work, **more)  # type: ignore[arg-type]


def report(
    metrics: RequestMetrics, number: int, proposal: Proposal, outcome: Outcome, kept: int, decided: Span | None = None
) -> RoundRecord:
    record = metrics.on_ended(make_settled_round(number, proposal, outcome, kept, decided), outcome.work.ended_ns)
    assert record is not None
    return record


def branches(number: int, work: Span) -> Branches:
    return Branches("r", 0, number, 5, (Branch((7,), (8, 9)), Branch((6,), (4, 9))), work)


def test_round_record_has_its_chain_and_times_since_the_start() -> None:
    metrics = RequestMetrics(BEGAN, reports=True)
    hit = Proposal((1, 2), Origin.PREPARED, Lookup.HIT)
    found = report(metrics, 3, hit, outcome(3, 1, Span(1_050, 1_090)), 2, Span(BEGAN + 40, BEGAN + 45))
    assert (found.round, found.lookup, found.source) == (3, "hit", "prepared")
    assert (found.drafted, found.accepted, found.tokens) == (2, 1, 2)
    assert found.verify == Span(50, 90) and found.decided == Span(40, 45)


def test_draft_work_is_reported_once_with_the_next_ended_round() -> None:
    metrics = RequestMetrics(BEGAN, reports=True)
    metrics.on_drafts("draft-0", branches(4, Span(1_010, 1_020)), BEGAN + 25)
    metrics.on_drafts("draft-0", Drafted("r", 0, 5, 8, (1, 2, 3), Span(1_030, 1_033)), BEGAN + 35)
    first = report(metrics, 4, Proposal(), outcome(4, 0, Span(1_005, 1_040)), 1)
    second = report(metrics, 5, Proposal(), outcome(5, 0, Span(1_045, 1_060)), 1)
    assert first.drafting == (
        DraftWork("draft-0", 4, 2, 2, Span(10, 20)),
        DraftWork("draft-0", 5, 3, 0, Span(30, 33)),
    )
    assert not second.drafting


def test_draft_work_outside_the_time_of_the_request_is_left_out() -> None:
    metrics = RequestMetrics(BEGAN, reports=True)
    for work in (Span(10, 20), Span(990, 1_010), Span(1_010, 9_999)):
        metrics.on_drafts("draft-1", branches(1, work), BEGAN + 100)
    assert not report(metrics, 1, Proposal(), outcome(1, 0, Span(1_000, 1_050)), 1).drafting


def test_in_process_chain_is_reported_as_draft_work() -> None:
    metrics = RequestMetrics(BEGAN, reports=True)
    own = outcome(2, 1, Span(1_030, 1_060), drafted=InProcessDraft((4, 5), span=Span(1_010, 1_030)))
    found = report(metrics, 2, Proposal((4, 5), Origin.DRAFTED, draft=InProcess(2)), own, 2)
    assert found.drafting == (DraftWork("target's drafter", 2, 2, 0, Span(10, 30)),) and found.decided is None


def test_round_in_which_a_drafter_found_nothing_has_no_source() -> None:
    metrics = RequestMetrics(BEGAN, reports=True)
    looked = Proposal((), Origin.COPIED, autonomous=True, draft=InProcess(8, NGRAM), drafter=NGRAM)
    assert report(metrics, 1, looked, outcome(1, 0, Span(1_000, 1_050)), 1).source == "target"
    assert metrics.timings(1, 1).ngram_chains == 0
    copied = Proposal((4,), Origin.COPIED, autonomous=True, draft=InProcess(8, NGRAM), drafter=NGRAM)
    assert report(metrics, 2, copied, outcome(2, 1, Span(1_050, 1_100)), 2).source == "copied"
    assert metrics.timings(1, 3).ngram_chains == 1


def test_tokens_past_the_end_do_not_count() -> None:
    found = report(RequestMetrics(BEGAN, reports=True), 9, Proposal((1, 2, 3)), outcome(9, 3, Span(1_000, 1_001)), 2)
    assert (found.accepted, found.tokens) == (2, 2)


def test_no_drafter_makes_a_report_too_large_to_be_sent() -> None:
    metrics, work = RequestMetrics(BEGAN, reports=True), Span(1_010, 1_020)
    for _ in range(MAX_ITEMS + 1):
        metrics.on_drafts("draft-0", Branches("r", 0, 4, 5, (), work), BEGAN + 25)
    encode(TextChunk("r", "a", (7,), rounds=(report(metrics, 4, Proposal(), outcome(4, 0, work), 1),) * 40))
