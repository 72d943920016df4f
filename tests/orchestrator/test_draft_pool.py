"""Several drafters share one cache by rank, each with its own state; none can change or delay a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.orchestrator.core import draft_pool
from outrider.orchestrator.core.metrics import RequestMetrics
from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.events import Admit, RequestEnded
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.codec import decode, encode
from outrider.protocol.messages import (
    Abilities,
    Branch,
    Branches,
    Close,
    Commit,
    Done,
    Drafted,
    Fault,
    Message,
    Open,
    Outcome,
    Prepare,
    Resync,
    Span,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import MAX_BRANCHES, MAX_SERIAL
from tests.orchestrator.cluster_in_process import Cluster
from tests.orchestrator.test_scheduler import PROMPT, random_text, script
from tests.pairwise import matrix
from tools.simulation.replay import Script

pytestmark = pytest.mark.usefixtures("counted_clock")

TEXT = random_text(21)
SAME_SCRIPT = script(TEXT)
OTHER_SCRIPT = script(random_text(22))
NONE = Span(0, 1)


def cluster(others: int = 1, **settings: object) -> Cluster:
    return Cluster(TEXT, SAME_SCRIPT, ngrams=False, others=[SAME_SCRIPT] * others, **settings)  # type: ignore[arg-type]


def begun(others: int = 1, mode: str = "ssd", **settings: object) -> Cluster:
    made = cluster(others, **settings)
    made.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=100), mode, frozenset()), 0)
    return made


def told(made: Cluster, name: str, kind: type[Message]) -> list[Message]:
    return [message for receiver, message in made.sent_to_drafters if receiver == name and isinstance(message, kind)]


def invalid_messages(made: Cluster) -> list[tuple[str, str]]:
    """The invalid that are noticed from now on."""
    invalid: list[tuple[str, str]] = []
    made.record_invalid = lambda name, kind: invalid.append((name, kind))  # type: ignore[method-assign]
    return invalid


@matrix(
    mode=["ar", "sd", "ssd", "auto"],
    full_depth=[False, True],
    others=[[SAME_SCRIPT], [OTHER_SCRIPT], [SAME_SCRIPT, OTHER_SCRIPT]],
)
def test_text_is_the_targets_with_any_drafters(mode: str, full_depth: bool, others: list[Script]) -> None:
    made = Cluster(TEXT, SAME_SCRIPT, full_depth=full_depth, others=others)
    made.run(PROMPT, 100, mode)
    assert made.generated == list(TEXT[10:110])


def test_each_rank_is_requested_once_across_all_drafters() -> None:
    made = cluster(2, branches=12, full_depth=True)
    timings = made.run(PROMPT, 100).timings
    asked = [[m for m in told(made, f"draft-{n}", Commit) if m.round == 9] for n in range(3)]  # type: ignore[attr-defined]
    assert [(m.rank_offset, m.branches) for (m,) in asked] == [(0, 4), (4, 4), (8, 4)]  # type: ignore[attr-defined]
    alone = Cluster(TEXT, SAME_SCRIPT, ngrams=False, branches=12, full_depth=True).run(PROMPT, 100).timings
    assert timings.cache_hits == alone.cache_hits


def test_round_is_complete_when_all_asked_drafters_finish() -> None:
    made = begun(branches=8, full_depth=True, steps=0)
    request = made.rounds._requests["r"]
    for name in ("draft-0", "draft-1"):
        assert not request.draft.final
        made.rounds.handle([(name, Branches("r", 0, 0, len(PROMPT), (), NONE, final=True))], 0)
    assert request.draft.final and request.draft.covered == 8


def test_branches_are_prepared_once_their_drafter_finishes() -> None:
    made = begun(branches=8, full_depth=True, steps=0)
    entries = (Branch((5,), (8, 9, 10)),)
    made.rounds.handle([("draft-1", Branches("r", 0, 0, len(PROMPT), entries, NONE, final=True))], 0)
    assert [m.committed for m in made.sent_to_target if isinstance(m, Prepare)] == [((5,),)]
    made.rounds.handle([("draft-0", Branches("r", 0, 0, len(PROMPT), (Branch((6,), (8,)),), NONE))], 0)
    assert len([m for m in made.sent_to_target if isinstance(m, Prepare)]) == 1


@pytest.mark.parametrize("first", ["draft-0", "draft-1"])
def test_deeper_of_two_branches_for_an_outcome_is_kept(first: str) -> None:
    made = begun(full_depth=True, steps=0)
    pushes = {"draft-0": (8,), "draft-1": (8, 9)}
    for name in sorted(pushes, reverse=first == "draft-1"):
        entries = (Branch((5,), pushes[name]),)
        made.rounds.handle([(name, Branches("r", 0, 0, len(PROMPT), entries, NONE))], 0)
    found = made.rounds._requests["r"].draft.cache.lookup((5,))
    assert found is not None and (found.chain, found.drafter) == ((8, 9), "draft-1")


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_drafters_get_their_tasks_right_after_the_text(mode: str) -> None:
    made = begun(branches=8, mode=mode, full_depth=True, steps=0)
    tasks = [(m.round, m.base_len, m.tokens, m.verifying, m.rank_offset) for m in told(made, "draft-1", Commit)]  # type: ignore[attr-defined]
    assert tasks == ([(0, len(PROMPT), (), (), 4)] if mode == "ssd" else [])
    assert [m.fan_out for m in told(made, "draft-1", Open)] == [2]  # type: ignore[attr-defined]
    made.rounds.handle([("draft-1", Resync("r", 0))], 0)
    assert [type(message) for _, message in made.sent_to_drafters[-2:]] == ([Open, Commit] if tasks else [Open, Open])
    assert told(made, "draft-1", Commit)[len(tasks) :] == told(made, "draft-1", Commit)[: len(tasks)]


def test_lost_task_costs_its_branches_only() -> None:
    made = begun(0, drop=lambda message: isinstance(message, Commit) and message.round == 0)
    for _ in range(100):
        made._turn()
    assert made.generated == list(TEXT[10:110]) and len(told(made, "draft-0", Open)) == 1
    assert len(told(made, "draft-0", Commit)) > 10


def test_lost_text_is_requested_at_the_first_task() -> None:
    made = begun(0)
    assert isinstance(made.link.inbox.popleft(), Open)
    made._turn()
    assert [type(message) for _, message in made.sent_to_drafters[:4]] == [Open, Commit, Open, Commit]
    assert [m.round for m in told(made, "draft-0", Commit)[:2]] == [0, 0]  # type: ignore[attr-defined]
    for _ in range(100):
        made._turn()
    assert made.generated == list(TEXT[10:110]) and len(told(made, "draft-0", Open)) == 2


def test_resync_reopens_only_the_drafter_that_asked() -> None:
    made = begun()
    for _ in range(5):
        made._turn()
    before = len(told(made, "draft-0", Open))
    made.rounds.handle([("draft-1", Resync("r", 0))], 0)
    assert len(told(made, "draft-1", Open)) == 2 and len(told(made, "draft-0", Open)) == before == 1


def test_joining_drafter_gets_the_whole_text_and_others_get_nothing() -> None:
    made = begun()
    late = made.workers.pop("draft-1")
    made.rounds.on_drafter_lost("draft-1", "it was lost", 0)
    for _ in range(5):
        made._turn()
    made.workers["draft-1"] = late
    made.rounds.on_drafter_ready("draft-1")
    opened = told(made, "draft-1", Open)[-1]
    assert isinstance(opened, Open) and opened.tokens.tolist() == made.rounds._requests["r"].sequence.tokens
    assert made.sent_to_drafters[-1] == ("draft-1", opened) and len(told(made, "draft-0", Open)) == 1
    for _ in range(200):
        made._turn()
    assert made.generated == list(TEXT[10:110]) and told(made, "draft-1", Commit)


def test_pool_forgets_drafters_that_left() -> None:
    made = begun()
    pool = made.rounds._draft_pool
    for _ in range(5):
        made._turn()
    assert set(pool._latencies) == {"draft-0", "draft-1"}
    dies(made, "draft-1")
    assert set(pool._latencies) == {"draft-0"}
    for _ in range(200):
        made._turn()
    assert made.generated == list(TEXT[10:110]) and not pool.sent._tasks


def test_left_out_drafter_gets_tokens_only_at_its_trial() -> None:
    made = begun()
    for name, lag_ms in (("draft-0", 1.0), ("draft-1", 10_000.0)):
        made.rounds._draft_pool._latencies[name].lag_ms.add(lag_ms)
    for _ in range(200):
        made._turn()
    tried, told_since = told(made, "draft-1", Commit)[1], len(told(made, "draft-1", Open))  # the first is of round 0
    assert made.generated == list(TEXT[10:110])
    others = [receiver for receiver, m in made.sent_to_drafters if isinstance(m, Commit) and m.round]
    assert (
        isinstance(tried, Commit)
        and tried.rank_offset == 8
        and others.index("draft-1") >= POLICY.drafter_trial_rounds - 1
    )
    assert list(tried.tokens) == list(TEXT[10 : tried.base_len]) and told_since == 1


def test_drafter_that_lacks_more_tokens_than_a_commit_holds_gets_the_whole_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_pool, "MAX_COMMIT_TOKENS", 8)
    made = begun()
    for name, lag_ms in (("draft-0", 1.0), ("draft-1", 10_000.0)):
        made.rounds._draft_pool._latencies[name].lag_ms.add(lag_ms)
    for _ in range(200):
        made._turn()
    (_, opened), tried = told(made, "draft-1", Open)[:2], told(made, "draft-1", Commit)[1]
    assert isinstance(opened, Open) and isinstance(tried, Commit)
    assert opened.tokens.tolist() == list(TEXT[: tried.base_len]) and tried.tokens == ()
    assert made.generated == list(TEXT[10:110]) and len(told(made, "draft-0", Open)) == 1


def dies(made: Cluster, name: str) -> None:
    made.workers.pop(name)
    made.rounds.on_drafter_lost(name, "it was lost", made._now)


def fails(made: Cluster, name: str) -> None:
    made.rounds.handle([(name, Fault("r", "no more of this"))], made._now)


def stops(made: Cluster, name: str) -> None:
    made.workers.pop(name)


@matrix(fate=[dies, fails, stops], name=["draft-0", "draft-1"], mode=["sd", "ssd"], after=[1, 4])
def test_remaining_drafters_continue_when_one_is_gone(
    fate: Callable[[Cluster, str], None], name: str, mode: str, after: int
) -> None:
    made = begun(mode=mode, steps=4)
    for _ in range(after):
        made._turn()
    fate(made, name)
    for _ in range(1000):
        made._turn()
    ended = [event for event in made.told if isinstance(event, RequestEnded)]
    assert made.generated == list(TEXT[10:110]) and len(ended) == 1
    assert ended[0].timings.draft_n_accepted > 20


def test_branch_of_another_drafter_is_served_after_the_lead_is_gone() -> None:
    made = begun(branches=8, steps=0)
    entries = (Branch((TEXT[10],), (8, 9)),)
    made.rounds.handle([("draft-1", Branches("r", 0, 0, len(PROMPT), entries, NONE))], 0)
    assert made.rounds._requests["r"].draft.lead == "draft-0"
    dies(made, "draft-0")
    made.rounds.handle([("target-0", Outcome("r", 0, 0, len(PROMPT), 0, TEXT[10], Span(0, 1)))], 1)
    assert [message.chain for message in made.sent_to_target if isinstance(message, Verify)] == [(8, 9)]


def test_no_branches_are_requested_for_the_last_token() -> None:
    made = cluster(branches=8)
    made.target_abilities = Abilities(ngrams=True)
    made.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=1), "ssd", frozenset()), 0)
    made._work_of(made.links[1], made.workers["draft-1"], 100)  # the other one, which leads, is still busy
    made._turn()
    assert made.generated == [TEXT[10]]
    assert [type(message) for _, message in made.sent_to_drafters] == [Open, Open, Close, Close]


def test_fastest_drafter_is_asked_for_a_chain() -> None:
    made = begun(mode="sd")
    for name, lag_ms in (("draft-0", 9.0), ("draft-1", 2.0)):
        made.rounds._draft_pool._latencies[name].lag_ms.add(lag_ms)
    for _ in range(10):
        made._turn()
    assert len(told(made, "draft-1", Commit)) > 3 and not told(made, "draft-0", Commit)


def test_trial_of_a_slow_drafter_begins_its_wait_for_the_next_one() -> None:
    made = begun(mode="sd", steps=0)
    latencies = made.rounds._draft_pool._latencies
    for name, lag_ms in (("draft-0", 9.0), ("draft-1", 2.0)):
        latencies[name].lag_ms.add(lag_ms)
    latencies["draft-0"].left_out = POLICY.drafter_trial_rounds
    made.rounds.handle([("target-0", made.target.answer(made._to_target.popleft())[0])], 0)
    assert told(made, "draft-0", Commit) and latencies["draft-0"].left_out == 0


def test_chain_from_an_unasked_drafter_is_dropped_and_counted() -> None:
    made = begun(mode="sd", steps=0)
    made.rounds._draft_pool._latencies["draft-0"].lag_ms.add(2.0)
    made.rounds._draft_pool._latencies["draft-1"].lag_ms.add(9.0)
    made._steps = 0
    made._prepare()
    for outcome in made.target.answer(made._to_target.popleft()):
        made.rounds.handle([("target-0", outcome)], 0)
    before, invalid, round_ = made.rounds.stale, invalid_messages(made), made.rounds._requests["r"].round
    made.rounds.handle([("draft-1", Drafted("r", 0, 1, len(PROMPT) + 1, (1, 2), NONE))], 0)
    assert made.rounds.stale == before + 1 and round_.wait and invalid == [("draft-1", "round")]
    made.rounds.handle([("draft-0", Drafted("r", 0, 1, len(PROMPT) + 1, (1, 2), NONE))], 0)
    assert not round_.wait


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_late_drafts_show_that_their_drafter_became_slower(mode: str) -> None:
    """Else the limits of waits, which follow from the costs, would stay too short for it."""
    made, slow = begun(0, mode, steps=0), Span(0, 90 * MILLISECOND_NS)
    estimates, now_ns = made.rounds._planner.estimates, 1000 * MILLISECOND_NS
    estimates.observe_draft(3, 6.0)
    estimates.observe_depth(8, 2.0)
    made.rounds.handle([("target-0", made.target.answer(made._to_target.popleft())[0])], now_ns)
    made.rounds.on_tick(2 * now_ns)
    assert made.rounds._requests["r"].round.wait is None, "the request goes on without them"
    drafted = Drafted("r", 0, 1, len(PROMPT) + 1, (1, 2, 3), slow)
    branches = Branches("r", 0, 0, len(PROMPT), (Branch((9,), (8,)),), slow)
    made.rounds.handle([("draft-0", drafted if mode == "sd" else branches)], 2 * now_ns)
    assert made.rounds.stale == 1
    assert estimates.step_ms() > 2.1 if mode == "sd" else estimates.depth_ms() > 2.1


def chain_after(made: Cluster, waited_ms: int, *between: Message, chain: tuple[int, ...] = (1, 2, 3)) -> None:
    """Lets the drafter answer the first request for a chain so long after it, with 6 ms of work, and these messages of
    the drafter before."""
    (outcome,), asked_ns = made.target.answer(made._to_target.popleft()), 1000 * MILLISECOND_NS
    made.rounds.handle([("target-0", outcome)], asked_ns)
    now_ns = asked_ns + waited_ms * MILLISECOND_NS
    made.rounds.handle([("draft-0", message) for message in between], now_ns)
    made.rounds.on_tick(now_ns)
    work = Span(now_ns - 6 * MILLISECOND_NS, now_ns)
    made.rounds.handle([("draft-0", Drafted("r", 0, 1, len(PROMPT) + 1, chain, work))], now_ns)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize(("waited_ms", "stale"), [(60, 0), (5000, 1)])
def test_wait_before_a_chain_is_drafted_counts_even_if_it_comes_too_late(mode: str, waited_ms: int, stale: int) -> None:
    """A drafter that computes for others, or rarely, begins late. In SSD it has got another task since."""
    made = begun(0, mode, steps=0)
    nothing = Branches("r", 0, 0, len(PROMPT), (), NONE, final=True)
    made.rounds.handle([("draft-0", nothing)] if mode == "ssd" else [], 0)
    made.rounds._planner.estimates.observe_depth(8, 0.1)
    chain_after(made, waited_ms)
    assert made.rounds.stale == stale
    assert made.rounds._planner.estimates.link_ms() == pytest.approx(waited_ms - 6)


def test_reading_of_a_text_before_a_chain_is_not_the_links_time() -> None:
    made = begun(0, "sd", steps=0)
    chain_after(made, 60, Resync("r", 0))
    assert made.rounds.stale == 0 and made.rounds._planner.estimates.has_drafted
    assert made.rounds._planner.estimates.link_ms() < 1.0


def test_empty_chain_shows_no_time_for_a_token() -> None:
    """A drafter at the end of its context answers at once."""
    made = begun(0, "sd", steps=0)
    chain_after(made, 60, chain=())
    assert made.rounds.stale == 0 and not made.rounds._planner.estimates.has_drafted


def test_unrequested_branches_are_dropped_and_counted() -> None:
    made = begun(branches=4, full_depth=True, steps=0)
    invalid = invalid_messages(made)
    many = tuple(Branch((n,), (8,)) for n in range(3))
    made.rounds.handle([("draft-1", Branches("r", 0, 0, len(PROMPT), many, NONE))], 0)
    made.rounds.handle([("draft-1", Branches("r", 0, 5, len(PROMPT), many[:1], NONE))], 0)
    assert invalid == [("draft-1", "length"), ("draft-1", "round")]
    assert made.rounds.stale == 2 and not made.rounds._requests["r"].draft.cache.branches


def test_timings_count_accepted_tokens_per_drafter() -> None:
    made = cluster(2, branches=12)
    timings = made.run(PROMPT, 100).timings
    held = timings.draft_n_accepted_by
    assert set(held) <= {"draft-0", "draft-1", "draft-2"} and len(held) > 1
    assert sum(held.values()) == timings.draft_n_accepted


def test_no_more_branches_are_prepared_than_one_message_holds() -> None:
    """Each message is within its limit, but together they are more than PREPARE can carry."""
    made = begun(others=0, branches=8, steps=0)
    for count in range(130):
        entries = tuple(Branch((8 * count + number,), (8, 9, 10)) for number in range(8))
        message = Branches("r", 0, 0, len(PROMPT), entries, NONE, final=count == 129)
        made.rounds.handle([("draft-0", message)], 0)
    (prepared,) = [message for message in made.sent_to_target if isinstance(message, Prepare)]
    assert len(decode(encode(prepared)).committed) == MAX_BRANCHES  # type: ignore[union-attr]


def test_sum_of_reported_memory_is_limited_to_what_a_message_can_carry() -> None:
    metrics = RequestMetrics()
    metrics.on_peak_memory("target-0", 1 << 30)
    metrics.on_peak_memory("draft-0", MAX_SERIAL)
    encode(Done("q", "eos", metrics.timings(1, 0)))
