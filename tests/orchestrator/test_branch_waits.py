"""After an outcome a request may wait for branches that are still to arrive: only if that pays, and never for long."""

from __future__ import annotations

import pytest

from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.next_round import max_wait_ms
from outrider.orchestrator.core.policy.estimates import Estimates
from outrider.orchestrator.core.proposal import CopiedTail, choose_fallback, should_wait_for_branch
from outrider.orchestrator.core.request import DrafterState, DraftState, SpeculationCache
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import Admit, Committed, RequestEnded, ToFront
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Abilities, Branch, Branches, Message, Outcome, Prepare, Span, Verify
from outrider.protocol.sampling import SamplingParams
from tests.fake_workers import FakeWorkers
from tests.harness.settings import round_settings

VERIFY_MS, DEPTH_MS, STEP_MS = 20.0, 5.0, 4.0


@pytest.fixture
def estimates() -> Estimates:
    found = Estimates()
    for _ in range(50):
        for rows in range(1, 6):
            found.observe_verify(rows, VERIFY_MS)
        found.observe_depth(8, DEPTH_MS)
        found.observe_draft(1, STEP_MS)
        found.observe_link(1.0)
        found.observe_chain(4, 4)
        found.observe_round(3, VERIFY_MS)
        found.observe_lookup(True)
    return found


def is_wait_worthwhile(estimates: Estimates, wait_ms: float) -> bool:
    return should_wait_for_branch(estimates, choose_fallback(estimates, CopiedTail(), 4, True), 4, wait_ms)


def test_short_wait_for_a_likely_hit_pays_and_a_long_one_does_not(estimates: Estimates) -> None:
    assert is_wait_worthwhile(estimates, 0.2)
    assert not is_wait_worthwhile(estimates, 50.0)


def test_repeated_misses_end_waiting_for_branches(estimates: Estimates) -> None:
    wait_ms = next(ms for ms in (3.0, 2.0, 1.0, 0.5) if is_wait_worthwhile(estimates, ms))
    for _ in range(60):
        estimates.observe_lookup(False)
    assert not is_wait_worthwhile(estimates, wait_ms)


def push(*accepted: int, final: bool = False) -> Branches:
    entries = tuple(Branch((*range(k), 7), (1, 2)) for k in accepted)
    return Branches("r", 0, 1, 4, entries, Span(0, DEPTH_MS_NS), final)


DEPTH_MS_NS = int(DEPTH_MS * MILLISECOND_NS)


class Drafting:
    """Two drafters of a request, each asked for eight branches."""

    def __init__(self) -> None:
        self.draft = DraftState({"lead": DrafterState(), "other": DrafterState()}, SpeculationCache())
        self.draft.start(["lead", "other"])
        for state in self.draft.drafters.values():
            state.assign(1, range(8), 4, 0)

    def add(self, message: Branches, name: str) -> None:
        self.draft.drafters[name].push(message, True, 0)
        self.draft.cache.add(message, name)

    def pushes_left(self) -> list[int]:
        return [self.draft.pushes_left(k, 3) for k in range(4)]


def test_only_full_acceptance_branches_may_need_a_second_push() -> None:
    first = Drafting()
    first.add(push(0, 1, 2, 3), "other")
    assert first.pushes_left() == [1, 1, 1, 2]
    second = Drafting()
    second.add(push(0, 1), "lead")
    assert second.pushes_left() == [0, 0, 0, 1]
    second.add(push(3), "lead")
    assert second.pushes_left() == [0, 0, 0, 0]
    third = Drafting()
    assert third.pushes_left()[3] == 2
    third.add(push(0, final=True), "lead")
    assert third.pushes_left() == [0, 0, 0, 0]
    fourth = Drafting()
    fourth.draft.start()
    assert fourth.pushes_left() == [0, 0, 0, 0], "none was asked"


def test_only_branches_of_the_lead_may_be_waited_for_to_become_longer() -> None:
    drafting = Drafting()
    drafting.add(push(0), "other")
    drafting.add(push(1), "lead")
    other, lead = drafting.draft.cache.branches.values()
    assert drafting.draft.can_grow(lead) and not drafting.draft.can_grow(other)
    drafting.add(push(2, final=True), "lead")
    assert not drafting.draft.can_grow(lead)


class RecordingWorkers(FakeWorkers):
    """The worker pool as the scheduler sees it. Records the messages to the target."""

    target_context = 10_000
    target_abilities = Abilities()

    def __init__(self) -> None:
        self.verifies: list[Verify] = []
        self.prepares: list[Prepare] = []

    def notes(self) -> list[str]:
        return []

    def drafters(self) -> set[str]:
        return {"draft-0"}

    def send_target(self, message: Message) -> None:
        if isinstance(message, Verify):
            self.verifies.append(message)
        elif isinstance(message, Prepare):
            self.prepares.append(message)

    def send_worker(self, name: str, message: Message) -> None:
        pass

    def flush_and_yield(self) -> None:
        pass


def test_wait_for_a_pushing_drafter_is_bounded_by_its_tree_time() -> None:
    workers, events = RecordingWorkers(), list[ToFront]()
    scheduler = Scheduler(workers, round_settings(4, 8, ngrams=False), events.append, Trace(None))
    scheduler.begin(Admit("r", (1, 2, 3), SamplingParams(max_tokens=50), "ssd", frozenset()), 0)
    push = Branches("r", 0, 0, 3, (Branch((5,), (1,)),), Span(0, MILLISECOND_NS))
    now_ns = MILLISECOND_NS
    scheduler.handle([("draft-0", push)], now_ns)
    scheduler.handle([("target-0", Outcome("r", 0, 0, 3, 0, 5, Span(0, 1)))], now_ns)
    asked_ns = now_ns
    assert not workers.verifies, "the branch is short and the next push near: the request waits"
    while not workers.verifies and now_ns < asked_ns + 10**9:
        now_ns += MILLISECOND_NS // 2
        scheduler.handle([("draft-0", push)], now_ns)
        scheduler.on_tick(now_ns)
    assert workers.verifies[0].chain == (1,)
    assert now_ns - asked_ns <= (max_wait_ms(5 * 1.0 + 0.5) + 1.0) * MILLISECOND_NS


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_copy_is_verified_if_the_drafter_does_not_answer(mode: str) -> None:
    workers = RecordingWorkers()
    scheduler = Scheduler(workers, round_settings(4, 8), lambda event: None, Trace(None))
    for _ in range(50):
        scheduler._planner.estimates.observe_chain(4, 4)
    scheduler.begin(Admit("r", (1, 2, 3, 4) * 5, SamplingParams(max_tokens=50), mode, frozenset()), 0)
    scheduler.handle([("target-0", Outcome("r", 0, 0, 20, 0, 1, Span(0, 1)))], MILLISECOND_NS)
    assert not workers.verifies, "the request waits"
    deadline_ns = scheduler.next_deadline_ns()
    assert deadline_ns
    scheduler.on_tick(deadline_ns)
    assert workers.verifies[-1].chain == (2, 3, 4)


def test_no_copy_is_verified_after_a_wait_if_rounds_are_reproducible() -> None:
    """How much of a copy is worth its rows depends on measured times, and what is verified on the residual text."""
    workers = RecordingWorkers()
    scheduler = Scheduler(workers, round_settings(4, 8, full_depth=True), lambda event: None, Trace(None))
    sampling = SamplingParams(max_tokens=50, temp=0.8, seed=1, rule="residual")
    scheduler.begin(Admit("r", (1, 2, 3, 4) * 5, sampling, "ssd", frozenset()), 0)
    scheduler.handle([("target-0", Outcome("r", 0, 0, 20, 0, 1, Span(0, 1)))], MILLISECOND_NS)
    deadline_ns = scheduler.next_deadline_ns()
    assert deadline_ns and not workers.verifies
    scheduler.on_tick(deadline_ns)
    assert workers.verifies[-1].chain == ()


def test_branch_after_its_outcome_is_used_and_counted_as_late() -> None:
    workers, events = RecordingWorkers(), list[ToFront]()
    scheduler = Scheduler(workers, round_settings(4, 8, ngrams=False), events.append, Trace(None))
    scheduler.begin(Admit("r", (1, 2, 3), SamplingParams(max_tokens=9), "ssd", frozenset(), rounds=True), 0)
    scheduler.handle([("target-0", Outcome("r", 0, 0, 3, 0, 5, Span(0, 1)))], 5 * MILLISECOND_NS)
    assert not workers.verifies, "the first push is near: the request waits"
    late = Branches("r", 0, 0, 3, (Branch((5,), (1, 2, 3, 4)),), Span(0, MILLISECOND_NS), final=True)
    scheduler.handle([("draft-0", late)], 6 * MILLISECOND_NS)
    assert workers.verifies[0].chain == (1, 2, 3, 4)
    scheduler.handle([("target-0", Outcome("r", 0, 1, 4, 4, 5, Span(0, 1)))], 7 * MILLISECOND_NS)
    scheduler.stop("r", "cancelled")
    timings = next(event.timings for event in events if isinstance(event, RequestEnded))
    assert (timings.cache_hits, timings.cache_misses, timings.cache_late, timings.draft_waits) == (0, 1, 1, 1)
    records = [record for event in events if isinstance(event, Committed) for record in event.rounds or ()]
    waited = Span(5 * MILLISECOND_NS, 6 * MILLISECOND_NS)
    assert [record.decided for record in records] == [None, waited], "from the outcome to the chain"


def push_growing(growing: tuple[Branch, ...], continues: bool = False, eos: int = 99) -> RecordingWorkers:
    """An unfinished push a little more than a push's time before the outcome of a verify of four tokens."""
    workers = RecordingWorkers()
    workers.target_abilities = Abilities(ngrams=continues)
    scheduler = Scheduler(workers, round_settings(4, 8), lambda event: None, Trace(None))
    estimates = scheduler._planner.estimates
    for _ in range(50):
        estimates.observe_draft(1, 100.0)  # a chain on request would not pay
        estimates.observe_depth(8, DEPTH_MS)
        for rows in range(1, 6):
            estimates.observe_verify(rows, VERIFY_MS)
    scheduler.begin(Admit("r", (1, 2, 3), SamplingParams(max_tokens=50), "ssd", frozenset({eos})), 0)
    first = Branches("r", 0, 0, 3, (Branch((5,), (1, 2, 3, 4)),), Span(0, DEPTH_MS_NS), final=True)
    scheduler.handle([("draft-0", first)], 0)
    scheduler.handle([("target-0", Outcome("r", 0, 0, 3, 0, 5, Span(0, 1)))], MILLISECOND_NS)
    assert workers.verifies[-1].chain == (1, 2, 3, 4)
    workers.prepares.clear()
    push = Branches("r", 0, 1, 4, growing, Span(0, DEPTH_MS_NS))
    scheduler.handle([("draft-0", push)], int((1 + VERIFY_MS - 1.1 * DEPTH_MS) * MILLISECOND_NS))
    return workers


@pytest.mark.parametrize("continues", [False, True])
def test_branch_that_may_grow_is_prepared_if_the_target_continues_without_it(continues: bool) -> None:
    """Otherwise the target would verify n-grams after an outcome whose branch has arrived."""
    growing = (Branch((9,), (7,), odds=(0.9,)), Branch((1, 2, 3, 4, 8), (6,), odds=(0.9,)))
    workers = push_growing(growing, continues)
    if continues:
        assert workers.prepares[-1].row_costs and workers.prepares[-1].committed == ((9,), (1, 2, 3, 4, 8))
    else:
        assert not workers.prepares, "the next push is likely to come in time"


def test_no_further_token_is_awaited_after_an_end_token() -> None:
    growing = (Branch((9,), (7, 6), odds=(0.9, 0.9)), Branch((8,), (7, 5), odds=(0.9, 0.9)))
    assert [prepare.committed for prepare in push_growing(growing, eos=6).prepares] == [((9,),)]


def test_target_continues_by_itself_after_a_miss_with_several_requests() -> None:
    """All branches have arrived, so there is nothing to wait for."""
    workers = RecordingWorkers()
    workers.target_abilities = Abilities(ngrams=True)
    scheduler = Scheduler(workers, round_settings(4, 8), lambda event: None, Trace(None))
    for name in "rs":
        scheduler.begin(Admit(name, (1, 2, 3), SamplingParams(max_tokens=50), "ssd", frozenset()), 0)
    whole = Branches("r", 0, 0, 3, (Branch((5,), (1, 2, 3, 4)),), Span(0, DEPTH_MS_NS), final=True)
    scheduler.handle([("draft-0", whole)], 0)
    assert workers.prepares[-1].committed == ((5,),) and workers.prepares[-1].row_costs
