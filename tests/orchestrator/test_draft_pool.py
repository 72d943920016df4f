"""Several drafters share one speculation cache by rank, each with its own state; none can change or delay a text."""

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
WORK = Span(0, 1)


def make_cluster(others: int = 1, **settings: object) -> Cluster:
    return Cluster(TEXT, SAME_SCRIPT, ngrams=False, others=[SAME_SCRIPT] * others, **settings)  # type: ignore[arg-type]


def start_request(others: int = 1, mode: str = "ssd", **settings: object) -> Cluster:
    cluster = make_cluster(others, **settings)
    cluster.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=100), mode, frozenset()), 0)
    return cluster


def messages_to(cluster: Cluster, name: str, kind: type[Message]) -> list[Message]:
    return [message for receiver, message in cluster.sent_to_drafters if receiver == name and isinstance(message, kind)]


def invalid_messages(cluster: Cluster) -> list[tuple[str, str]]:
    """Records the senders and kinds of messages that are found invalid from now on."""
    invalid: list[tuple[str, str]] = []
    cluster.record_invalid = lambda name, kind: invalid.append((name, kind))  # type: ignore[method-assign]
    return invalid


@matrix(
    mode=["ar", "sd", "ssd", "auto"],
    full_depth=[False, True],
    others=[[SAME_SCRIPT], [OTHER_SCRIPT], [SAME_SCRIPT, OTHER_SCRIPT]],
)
def test_text_is_the_targets_with_any_drafters(mode: str, full_depth: bool, others: list[Script]) -> None:
    cluster = Cluster(TEXT, SAME_SCRIPT, full_depth=full_depth, others=others)
    cluster.run(PROMPT, 100, mode)
    assert cluster.generated == list(TEXT[10:110])


def test_each_rank_is_requested_once_across_all_drafters() -> None:
    cluster = make_cluster(2, branches=12, full_depth=True)
    timings = cluster.run(PROMPT, 100).timings
    asked = [[m for m in messages_to(cluster, f"draft-{n}", Commit) if m.round == 9] for n in range(3)]  # type: ignore[attr-defined]
    assert [(m.rank_offset, m.branches) for (m,) in asked] == [(0, 4), (4, 4), (8, 4)]  # type: ignore[attr-defined]
    alone = Cluster(TEXT, SAME_SCRIPT, ngrams=False, branches=12, full_depth=True).run(PROMPT, 100).timings
    assert timings.cache_hits == alone.cache_hits


def test_round_is_complete_when_all_asked_drafters_finish() -> None:
    cluster = start_request(branches=8, full_depth=True, steps=0)
    request = cluster.rounds._requests["r"]
    for name in ("draft-0", "draft-1"):
        assert not request.draft.final
        cluster.rounds.handle([(name, Branches("r", 0, 0, len(PROMPT), (), WORK, final=True))], 0)
    assert request.draft.final and request.draft.covered == 8


def test_branches_are_prepared_once_their_drafter_finishes() -> None:
    cluster = start_request(branches=8, full_depth=True, steps=0)
    entries = (Branch((5,), (8, 9, 10)),)
    cluster.rounds.handle([("draft-1", Branches("r", 0, 0, len(PROMPT), entries, WORK, final=True))], 0)
    assert [m.committed for m in cluster.sent_to_target if isinstance(m, Prepare)] == [((5,),)]
    cluster.rounds.handle([("draft-0", Branches("r", 0, 0, len(PROMPT), (Branch((6,), (8,)),), WORK))], 0)
    assert len([m for m in cluster.sent_to_target if isinstance(m, Prepare)]) == 1


@pytest.mark.parametrize("first", ["draft-0", "draft-1"])
def test_deeper_of_two_branches_for_an_outcome_is_kept(first: str) -> None:
    cluster = start_request(full_depth=True, steps=0)
    pushes = {"draft-0": (8,), "draft-1": (8, 9)}
    for name in sorted(pushes, reverse=first == "draft-1"):
        entries = (Branch((5,), pushes[name]),)
        cluster.rounds.handle([(name, Branches("r", 0, 0, len(PROMPT), entries, WORK))], 0)
    found = cluster.rounds._requests["r"].draft.cache.lookup((5,))
    assert found is not None and (found.chain, found.drafter) == ((8, 9), "draft-1")


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_drafters_get_their_tasks_right_after_the_text(mode: str) -> None:
    cluster = start_request(branches=8, mode=mode, full_depth=True, steps=0)
    tasks = [
        (m.round, m.base_len, m.tokens, m.verifying, m.rank_offset) for m in messages_to(cluster, "draft-1", Commit)
    ]  # type: ignore[attr-defined]
    assert tasks == ([(0, len(PROMPT), (), (), 4)] if mode == "ssd" else [])
    assert [m.fan_out for m in messages_to(cluster, "draft-1", Open)] == [2]  # type: ignore[attr-defined]
    cluster.rounds.handle([("draft-1", Resync("r", 0))], 0)
    assert [type(message) for _, message in cluster.sent_to_drafters[-2:]] == (
        [Open, Commit] if tasks else [Open, Open]
    )
    assert (
        messages_to(cluster, "draft-1", Commit)[len(tasks) :] == messages_to(cluster, "draft-1", Commit)[: len(tasks)]
    )


def test_lost_task_costs_its_branches_only() -> None:
    cluster = start_request(0, drop=lambda message: isinstance(message, Commit) and message.round == 0)
    for _ in range(100):
        cluster._turn()
    assert cluster.generated == list(TEXT[10:110]) and len(messages_to(cluster, "draft-0", Open)) == 1
    assert len(messages_to(cluster, "draft-0", Commit)) > 10


def test_lost_text_is_requested_at_the_first_task() -> None:
    cluster = start_request(0)
    assert isinstance(cluster.link.inbox.popleft(), Open)
    cluster._turn()
    assert [type(message) for _, message in cluster.sent_to_drafters[:4]] == [Open, Commit, Open, Commit]
    assert [m.round for m in messages_to(cluster, "draft-0", Commit)[:2]] == [0, 0]  # type: ignore[attr-defined]
    for _ in range(100):
        cluster._turn()
    assert cluster.generated == list(TEXT[10:110]) and len(messages_to(cluster, "draft-0", Open)) == 2


def test_resync_reopens_only_the_drafter_that_asked() -> None:
    cluster = start_request()
    for _ in range(5):
        cluster._turn()
    before = len(messages_to(cluster, "draft-0", Open))
    cluster.rounds.handle([("draft-1", Resync("r", 0))], 0)
    assert len(messages_to(cluster, "draft-1", Open)) == 2 and len(messages_to(cluster, "draft-0", Open)) == before == 1


def test_joining_drafter_gets_the_whole_text_and_others_get_nothing() -> None:
    cluster = start_request()
    late = cluster.workers.pop("draft-1")
    cluster.rounds.on_drafter_lost("draft-1", "it was lost", 0)
    for _ in range(5):
        cluster._turn()
    cluster.workers["draft-1"] = late
    cluster.rounds.on_drafter_ready("draft-1")
    opened = messages_to(cluster, "draft-1", Open)[-1]
    assert isinstance(opened, Open) and opened.tokens.tolist() == cluster.rounds._requests["r"].sequence.tokens
    assert cluster.sent_to_drafters[-1] == ("draft-1", opened) and len(messages_to(cluster, "draft-0", Open)) == 1
    for _ in range(200):
        cluster._turn()
    assert cluster.generated == list(TEXT[10:110]) and messages_to(cluster, "draft-1", Commit)


def test_pool_forgets_drafters_that_left() -> None:
    cluster = start_request()
    pool = cluster.rounds._draft_pool
    for _ in range(5):
        cluster._turn()
    assert set(pool._latencies) == {"draft-0", "draft-1"}
    dies(cluster, "draft-1")
    assert set(pool._latencies) == {"draft-0"}
    for _ in range(200):
        cluster._turn()
    assert cluster.generated == list(TEXT[10:110]) and not pool.sent._tasks


def test_left_out_drafter_gets_tokens_only_at_its_trial() -> None:
    cluster = start_request()
    for name, lag_ms in (("draft-0", 1.0), ("draft-1", 10_000.0)):
        cluster.rounds._draft_pool._latencies[name].lag_ms.add(lag_ms)
    for _ in range(200):
        cluster._turn()
    tried, opened_count = (
        messages_to(cluster, "draft-1", Commit)[1],
        len(messages_to(cluster, "draft-1", Open)),
    )  # the first is of round 0
    assert cluster.generated == list(TEXT[10:110])
    others = [receiver for receiver, m in cluster.sent_to_drafters if isinstance(m, Commit) and m.round]
    assert (
        isinstance(tried, Commit)
        and tried.rank_offset == 8
        and others.index("draft-1") >= POLICY.drafter_trial_rounds - 1
    )
    assert list(tried.tokens) == list(TEXT[10 : tried.base_len]) and opened_count == 1


def test_drafter_that_lacks_more_tokens_than_a_commit_holds_gets_the_whole_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft_pool, "MAX_COMMIT_TOKENS", 8)
    cluster = start_request()
    for name, lag_ms in (("draft-0", 1.0), ("draft-1", 10_000.0)):
        cluster.rounds._draft_pool._latencies[name].lag_ms.add(lag_ms)
    for _ in range(200):
        cluster._turn()
    (_, opened), tried = messages_to(cluster, "draft-1", Open)[:2], messages_to(cluster, "draft-1", Commit)[1]
    assert isinstance(opened, Open) and isinstance(tried, Commit)
    assert opened.tokens.tolist() == list(TEXT[: tried.base_len]) and tried.tokens == ()
    assert cluster.generated == list(TEXT[10:110]) and len(messages_to(cluster, "draft-0", Open)) == 1


def dies(cluster: Cluster, name: str) -> None:
    cluster.workers.pop(name)
    cluster.rounds.on_drafter_lost(name, "it was lost", cluster._now)


def fails(cluster: Cluster, name: str) -> None:
    cluster.rounds.handle([(name, Fault("r", "no more of this"))], cluster._now)


def stops(cluster: Cluster, name: str) -> None:
    cluster.workers.pop(name)


@matrix(fate=[dies, fails, stops], name=["draft-0", "draft-1"], mode=["sd", "ssd"], after=[1, 4])
def test_remaining_drafters_continue_when_one_is_gone(
    fate: Callable[[Cluster, str], None], name: str, mode: str, after: int
) -> None:
    cluster = start_request(mode=mode, steps=4)
    for _ in range(after):
        cluster._turn()
    fate(cluster, name)
    for _ in range(1000):
        cluster._turn()
    ended = [event for event in cluster.events if isinstance(event, RequestEnded)]
    assert cluster.generated == list(TEXT[10:110]) and len(ended) == 1
    assert ended[0].timings.draft_n_accepted > 20


def test_branch_of_another_drafter_is_served_after_the_lead_is_gone() -> None:
    cluster = start_request(branches=8, steps=0)
    entries = (Branch((TEXT[10],), (8, 9)),)
    cluster.rounds.handle([("draft-1", Branches("r", 0, 0, len(PROMPT), entries, WORK))], 0)
    assert cluster.rounds._requests["r"].draft.lead == "draft-0"
    dies(cluster, "draft-0")
    cluster.rounds.handle([("target-0", Outcome("r", 0, 0, len(PROMPT), 0, TEXT[10], Span(0, 1)))], 1)
    assert [message.chain for message in cluster.sent_to_target if isinstance(message, Verify)] == [(8, 9)]


def test_no_branches_are_requested_for_the_last_token() -> None:
    cluster = make_cluster(branches=8)
    cluster.target_abilities = Abilities(ngrams=True)
    cluster.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=1), "ssd", frozenset()), 0)
    cluster._work_of(cluster.links[1], cluster.workers["draft-1"], 100)  # the lead, draft-0, is still busy
    cluster._turn()
    assert cluster.generated == [TEXT[10]]
    assert [type(message) for _, message in cluster.sent_to_drafters] == [Open, Open, Close, Close]


def test_fastest_drafter_is_asked_for_a_chain() -> None:
    cluster = start_request(mode="sd")
    for name, lag_ms in (("draft-0", 9.0), ("draft-1", 2.0)):
        cluster.rounds._draft_pool._latencies[name].lag_ms.add(lag_ms)
    for _ in range(10):
        cluster._turn()
    assert len(messages_to(cluster, "draft-1", Commit)) > 3 and not messages_to(cluster, "draft-0", Commit)


def test_trial_of_a_slow_drafter_restarts_its_count_to_the_next_one() -> None:
    cluster = start_request(mode="sd", steps=0)
    latencies = cluster.rounds._draft_pool._latencies
    for name, lag_ms in (("draft-0", 9.0), ("draft-1", 2.0)):
        latencies[name].lag_ms.add(lag_ms)
    latencies["draft-0"].left_out = POLICY.drafter_trial_rounds
    cluster.rounds.handle([("target-0", cluster.target.answer(cluster._to_target.popleft())[0])], 0)
    assert messages_to(cluster, "draft-0", Commit) and latencies["draft-0"].left_out == 0


def test_chain_from_an_unasked_drafter_is_dropped_and_counted() -> None:
    cluster = start_request(mode="sd", steps=0)
    cluster.rounds._draft_pool._latencies["draft-0"].lag_ms.add(2.0)
    cluster.rounds._draft_pool._latencies["draft-1"].lag_ms.add(9.0)
    cluster._steps = 0
    cluster._prepare()
    for outcome in cluster.target.answer(cluster._to_target.popleft()):
        cluster.rounds.handle([("target-0", outcome)], 0)
    before, invalid, round_ = cluster.rounds.stale, invalid_messages(cluster), cluster.rounds._requests["r"].round
    cluster.rounds.handle([("draft-1", Drafted("r", 0, 1, len(PROMPT) + 1, (1, 2), WORK))], 0)
    assert cluster.rounds.stale == before + 1 and round_.wait and invalid == [("draft-1", "round")]
    cluster.rounds.handle([("draft-0", Drafted("r", 0, 1, len(PROMPT) + 1, (1, 2), WORK))], 0)
    assert not round_.wait


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_late_drafts_update_the_costs_of_their_drafter(mode: str) -> None:
    """Otherwise the limits of waits, which are computed from the costs, would stay too short."""
    cluster, slow = start_request(0, mode, steps=0), Span(0, 90 * MILLISECOND_NS)
    estimates, now_ns = cluster.rounds._planner.estimates, 1000 * MILLISECOND_NS
    estimates.observe_draft(3, 6.0)
    estimates.observe_depth(8, 2.0)
    cluster.rounds.handle([("target-0", cluster.target.answer(cluster._to_target.popleft())[0])], now_ns)
    cluster.rounds.on_tick(2 * now_ns)
    assert cluster.rounds._requests["r"].round.wait is None, "the request continues without them"
    drafted = Drafted("r", 0, 1, len(PROMPT) + 1, (1, 2, 3), slow)
    branches = Branches("r", 0, 0, len(PROMPT), (Branch((9,), (8,)),), slow)
    cluster.rounds.handle([("draft-0", drafted if mode == "sd" else branches)], 2 * now_ns)
    assert cluster.rounds.stale == 1
    assert estimates.step_ms() > 2.1 if mode == "sd" else estimates.depth_ms() > 2.1


def chain_after(cluster: Cluster, waited_ms: int, *between: Message, chain: tuple[int, ...] = (1, 2, 3)) -> None:
    """Handles the messages `between` and then a chain, `waited_ms` after the first request for one. Drafting it took
    6 ms."""
    (outcome,), asked_ns = cluster.target.answer(cluster._to_target.popleft()), 1000 * MILLISECOND_NS
    cluster.rounds.handle([("target-0", outcome)], asked_ns)
    now_ns = asked_ns + waited_ms * MILLISECOND_NS
    cluster.rounds.handle([("draft-0", message) for message in between], now_ns)
    cluster.rounds.on_tick(now_ns)
    work = Span(now_ns - 6 * MILLISECOND_NS, now_ns)
    cluster.rounds.handle([("draft-0", Drafted("r", 0, 1, len(PROMPT) + 1, chain, work))], now_ns)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize(("waited_ms", "stale"), [(60, 0), (5000, 1)])
def test_wait_before_a_chain_is_drafted_counts_even_if_it_comes_too_late(mode: str, waited_ms: int, stale: int) -> None:
    """A drafter that is busy with other requests begins late. In SSD it has been sent another task since."""
    cluster = start_request(0, mode, steps=0)
    nothing = Branches("r", 0, 0, len(PROMPT), (), WORK, final=True)
    cluster.rounds.handle([("draft-0", nothing)] if mode == "ssd" else [], 0)
    cluster.rounds._planner.estimates.observe_depth(8, 0.1)
    chain_after(cluster, waited_ms)
    assert cluster.rounds.stale == stale
    assert cluster.rounds._planner.estimates.link_ms() == pytest.approx(waited_ms - 6)


def test_reading_a_text_before_a_chain_does_not_count_as_link_time() -> None:
    cluster = start_request(0, "sd", steps=0)
    chain_after(cluster, 60, Resync("r", 0))
    assert cluster.rounds.stale == 0 and cluster.rounds._planner.estimates.has_drafted
    assert cluster.rounds._planner.estimates.link_ms() < 1.0


def test_empty_chain_gives_no_estimate_of_the_time_of_a_token() -> None:
    """A drafter at the end of its context answers at once with an empty chain."""
    cluster = start_request(0, "sd", steps=0)
    chain_after(cluster, 60, chain=())
    assert cluster.rounds.stale == 0 and not cluster.rounds._planner.estimates.has_drafted


def test_unrequested_branches_are_dropped_and_counted() -> None:
    cluster = start_request(branches=4, full_depth=True, steps=0)
    invalid = invalid_messages(cluster)
    many = tuple(Branch((n,), (8,)) for n in range(3))
    cluster.rounds.handle([("draft-1", Branches("r", 0, 0, len(PROMPT), many, WORK))], 0)
    cluster.rounds.handle([("draft-1", Branches("r", 0, 5, len(PROMPT), many[:1], WORK))], 0)
    assert invalid == [("draft-1", "length"), ("draft-1", "round")]
    assert cluster.rounds.stale == 2 and not cluster.rounds._requests["r"].draft.cache.branches


def test_timings_count_accepted_tokens_per_drafter() -> None:
    cluster = make_cluster(2, branches=12)
    timings = cluster.run(PROMPT, 100).timings
    accepted = timings.draft_n_accepted_by
    assert set(accepted) <= {"draft-0", "draft-1", "draft-2"} and len(accepted) > 1
    assert sum(accepted.values()) == timings.draft_n_accepted


def test_no_more_branches_are_prepared_than_one_message_holds() -> None:
    """Each message is within its limit, but together they are more than PREPARE can carry."""
    cluster = start_request(others=0, branches=8, steps=0)
    for count in range(130):
        entries = tuple(Branch((8 * count + number,), (8, 9, 10)) for number in range(8))
        message = Branches("r", 0, 0, len(PROMPT), entries, WORK, final=count == 129)
        cluster.rounds.handle([("draft-0", message)], 0)
    (prepared,) = [message for message in cluster.sent_to_target if isinstance(message, Prepare)]
    assert len(decode(encode(prepared)).committed) == MAX_BRANCHES  # type: ignore[union-attr]


def test_sum_of_reported_memory_is_limited_to_what_a_message_can_carry() -> None:
    metrics = RequestMetrics()
    metrics.on_peak_memory("target-0", 1 << 30)
    metrics.on_peak_memory("draft-0", MAX_SERIAL)
    encode(Done("q", "eos", metrics.timings(1, 0)))
