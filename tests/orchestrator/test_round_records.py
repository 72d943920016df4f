"""The rounds that a request reports: each chain's source, the work, and the waits."""

from __future__ import annotations

from outrider.orchestrator.core.metrics import RoundRecords
from outrider.orchestrator.core.proposal import Lookup, Proposal, ProposalSource
from outrider.protocol.messages import Branch, Branches, Drafted, DraftWork, InProcessDraft, Outcome, Span

BEGAN = 1_000


def outcome(number: int, accepted: int, work: Span, **more: object) -> Outcome:
    return Outcome("r", 0, number, 5, accepted, 7, work, **more)  # type: ignore[arg-type]


def branches(number: int, work: Span) -> Branches:
    return Branches("r", 0, number, 5, 2, (Branch((7,), (8, 9)), Branch((6,), (4, 9))), work)


def test_a_round_is_told_with_its_chain_and_on_the_requests_clock() -> None:
    records = RoundRecords(BEGAN)
    hit = Proposal((1, 2), ProposalSource.CACHE, Lookup.HIT)
    records.on_proposed(3, hit, BEGAN + 40)
    found = records.on_ended(3, hit, outcome(3, 1, Span(1_050, 1_090)), 2)
    assert (found.round, found.lookup, found.source) == (3, "hit", "cache")
    assert (found.drafted, found.accepted, found.tokens) == (2, 1, 2)
    assert found.verify == Span(50, 90) and found.decided == Span(40, 40)


def test_a_wait_begins_with_the_first_of_its_kind_and_ends_with_the_chain() -> None:
    """A wait for a branch may be followed by one for a chain: the round was undecided all the time, and missed."""
    records = RoundRecords(BEGAN)
    records.on_wait(False, BEGAN + 10)
    records.on_wait(True, BEGAN + 20)
    records.on_proposed(1, Proposal(), BEGAN + 30)
    records.on_proposed(2, Proposal(), BEGAN + 50)
    told = [records.on_ended(number, Proposal(), outcome(number, 0, Span(1_060, 1_070)), 1) for number in (1, 2)]
    assert [record.decided for record in told] == [Span(10, 30), Span(50, 50)]
    assert [record.lookup for record in told] == ["miss", "none"]


def test_drafters_work_is_told_once_with_the_next_round_that_ends() -> None:
    records = RoundRecords(BEGAN)
    records.on_drafted("draft-0", branches(4, Span(1_010, 1_020)), BEGAN + 25)
    records.on_drafted("draft-0", Drafted("r", 0, 5, 8, (1, 2, 3), Span(1_030, 1_033)), BEGAN + 35)
    first = records.on_ended(4, Proposal(), outcome(4, 0, Span(1_005, 1_040)), 1)
    second = records.on_ended(5, Proposal(), outcome(5, 0, Span(1_045, 1_060)), 1)
    assert first.drafting == (
        DraftWork("draft-0", 4, 2, 2, Span(10, 20)),
        DraftWork("draft-0", 5, 3, 0, Span(30, 33)),
    )
    assert not second.drafting


def test_work_on_another_machines_clock_is_left_out() -> None:
    records = RoundRecords(BEGAN)
    for work in (Span(10, 20), Span(990, 1_010), Span(1_010, 9_999)):
        records.on_drafted("draft-1", branches(1, work), BEGAN + 100)
    assert not records.on_ended(1, Proposal(), outcome(1, 0, Span(1_000, 1_050)), 1).drafting


def test_a_chain_that_the_target_drafted_itself_is_work_of_a_drafter() -> None:
    records = RoundRecords(BEGAN)
    own = outcome(2, 1, Span(1_030, 1_060), drafted=InProcessDraft((4, 5), Span(1_010, 1_030)))
    found = records.on_ended(2, Proposal((4, 5), ProposalSource.DRAFTER, draft=2), own, 2)
    assert found.drafting == (DraftWork("target's drafter", 2, 2, 0, Span(10, 30)),) and found.decided is None


def test_tokens_past_the_end_do_not_count() -> None:
    found = RoundRecords(BEGAN).on_ended(9, Proposal((1, 2, 3)), outcome(9, 3, Span(1_000, 1_001)), 2)
    assert (found.accepted, found.tokens) == (2, 2)
