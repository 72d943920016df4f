"""The scheduler on every path: the text is the target's own, no request hangs, and the counts are right."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections import Counter
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest
from msgspec import structs

from outrider.orchestrator.core.next_round import MAX_WAIT_MS
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.policy.forecasts import Arm
from outrider.orchestrator.core.request import Request, SettledRound
from outrider.orchestrator.events import Admit, Committed, RequestEnded
from outrider.protocol.clock import MILLISECOND_NS, OUTCOME_TIMEOUT_NS
from outrider.protocol.heads import NGRAM
from outrider.protocol.messages import (
    Abilities,
    Branch,
    Branches,
    Commit,
    Drafted,
    Fault,
    Halt,
    Message,
    Open,
    Outcome,
    Prepare,
    Resync,
    Span,
    Timings,
    Verify,
    WorkerNote,
)
from outrider.protocol.ngrams import INDEX_PIECE_TOKENS, NgramIndex
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Origin
from outrider.protocol.stats import DURATION_BOUNDS_MS
from tests.harness.settings import round_settings
from tests.orchestrator.cluster_in_process import TURN_NS, Cluster, Script
from tests.pairwise import matrix
from tests.system.links import intercept

pytestmark = pytest.mark.usefixtures("counted_clock")

VOCAB = 200
PROMPT = tuple(range(10, 20))


def random_text(seed: int, length: int = 400) -> tuple[int, ...]:
    rng = random.Random(seed)
    return PROMPT + tuple(rng.randrange(1, VOCAB) for _ in range(length))


def script(
    text: tuple[int, ...], acceptance: tuple[float, ...] = (0.7,), ranks: tuple[float, ...] = (0.6, 0.2)
) -> Script:
    return Script((text,), acceptance, ranks, VOCAB)


@matrix(
    mode=["ar", "sd", "ssd", "auto"],
    depth=[1, 3, 6],
    branches=[1, 6, 20],
    policy=["best-first", "geometric", "uniform"],
)
def test_every_mode_generates_the_targets_text(mode: str, depth: int, branches: int, policy: str) -> None:
    text = random_text(1)
    cluster = Cluster(text, script(text), depth=depth, branches=branches, policy=policy)
    ended = cluster.run(PROMPT, 100, mode)
    assert cluster.generated == list(text[10:110])
    assert ended.reason == "length"
    assert ended.timings.predicted_n == 100


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_late_or_missing_branches_change_no_token(steps: int) -> None:
    text = random_text(2)
    cluster = Cluster(text, script(text), steps=steps)
    cluster.run(PROMPT, 120)
    assert cluster.generated == list(text[10:130])


def test_a_perfect_drafter_commits_depth_plus_one_tokens_a_round() -> None:
    text = random_text(3)
    cluster = Cluster(text, script(text, (1.0,)), depth=4, full_depth=True)
    ended = cluster.run(PROMPT, 101)
    assert ended.timings.draft_n_accepted == ended.timings.draft_n == 80
    assert ended.timings.draft_rounds == 20
    assert ended.timings.cache_misses == 0
    assert ended.timings.cache_hits == 20


REPEATING = PROMPT + random_text(1, 60)[10:] * 6


@cache
def run_with_reports(mode: str, text: tuple[int, ...], steps: int) -> tuple[Timings, Cluster]:
    cluster = Cluster(text, script(text), steps=steps)
    return cluster.run(PROMPT, 300, mode, origins=True, rounds=True).timings, cluster


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
@pytest.mark.parametrize("text", [random_text(1), REPEATING], ids=["new", "repeating"])
@pytest.mark.parametrize("steps", [1, 100])
def test_origins_agree_with_the_timings(mode: str, text: tuple[int, ...], steps: int) -> None:
    times, cluster = run_with_reports(mode, text, steps)
    found = Counter(cluster.origins)
    assert found.total() == times.predicted_n == 300
    assert found[Origin.TARGET] == times.predicted_n - times.draft_n_accepted
    assert found.total() - found[Origin.TARGET] == sum(times.accepted_by_position)
    assert (found[Origin.PREPARED] > 0) is (times.cache_hits + times.cache_late > 0)
    followed = (times.cache_late, times.missed_then_plain, times.missed_then_copied, times.missed_then_drafted)
    assert sum(followed) == times.cache_misses
    if mode == "ar":
        assert found == {Origin.TARGET: 300}
    if mode == "sd":
        assert found[Origin.DRAFTED] and not found[Origin.PREPARED]
    if text is REPEATING and mode != "ar":
        assert found[Origin.COPIED] > 0


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
@pytest.mark.parametrize("text", [random_text(1), REPEATING], ids=["new", "repeating"])
@pytest.mark.parametrize("steps", [1, 100])
def test_round_records_agree_with_the_timings(mode: str, text: tuple[int, ...], steps: int) -> None:
    times, cluster = run_with_reports(mode, text, steps)
    records = cluster.records
    assert [record.round for record in records] == list(range(times.rounds))
    assert sum(record.tokens for record in records) == times.predicted_n == 300
    assert sum(record.drafted for record in records) == times.draft_n
    assert sum(record.accepted for record in records) == times.draft_n_accepted
    assert sum(record.lookup in ("hit", "grown") for record in records) == times.cache_hits
    assert sum(record.lookup in ("late", "miss") for record in records) == times.cache_misses
    assert sum(record.source == "copied" for record in records) == times.ngram_chains
    assert (times.cache_hits > 0) is (mode in ("ssd", "auto"))


def test_origins_and_rounds_are_reported_only_on_request() -> None:
    text = random_text(1)
    cluster = Cluster(text, script(text))
    cluster.run(PROMPT, 20)
    committed = [event for event in cluster.events if isinstance(event, Committed)]
    assert all(event.origins is None and event.rounds is None for event in committed)


def test_an_always_wrong_drafter_commits_one_token_a_round() -> None:
    text = random_text(4)
    cluster = Cluster(text, script(text, (0.0,), (0.0,)), depth=4, ngrams=False)
    ended = cluster.run(PROMPT, 50)
    assert cluster.generated == list(text[10:60])
    assert ended.timings.draft_n_accepted == 0
    assert ended.timings.rounds == 50
    assert ended.timings.cache_hits == 0


def test_hits_follow_the_prescribed_bonus_rank() -> None:
    """A bonus token that is always the first candidate always hits. One that is no candidate never hits."""
    text = random_text(5, 600)
    found = Cluster(text, script(text, (0.6,), (1.0,)), full_depth=True, branches=8).run(PROMPT, 400).timings
    assert found.cache_misses == 0
    lost = (
        Cluster(text, script(text, (0.6,), (0.0,)), full_depth=True, branches=8, ngrams=False).run(PROMPT, 400).timings
    )
    # The remaining hits are after full acceptance, where the script makes the bonus token right as well.
    assert lost.cache_hits < 0.4 * found.cache_hits


def test_eos_ends_the_text_and_later_tokens_do_not_count() -> None:
    text = random_text(6)
    end = text[10 + 37]
    first = text.index(end, 10) - 10
    cluster = Cluster(text, script(text, (1.0,)), depth=6)
    ended = cluster.run(PROMPT, 200, eos=frozenset({end}))
    assert ended.reason == "eos"
    assert cluster.generated == list(text[10 : 10 + first + 1])
    assert ended.timings.predicted_n == first + 1
    assert ended.timings.draft_n_accepted <= ended.timings.predicted_n


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
def test_shortest_requests_end_at_max_tokens(max_tokens: int, mode: str) -> None:
    text = random_text(7)
    cluster = Cluster(text, script(text))
    ended = cluster.run(PROMPT, max_tokens, mode)
    assert cluster.generated == list(text[10 : 10 + max_tokens])
    assert ended.reason == "length"


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
def test_generation_ends_at_the_targets_context_length(mode: str) -> None:
    text = random_text(8)
    cluster = Cluster(text, script(text), context=30)
    ended = cluster.run(PROMPT, 200, mode)
    assert cluster.generated == list(text[10:30])
    assert ended.reason == "length"


def test_hit_on_a_prepared_branch_sends_no_verify() -> None:
    text = random_text(13)
    cluster = Cluster(text, script(text))
    ended = cluster.run(PROMPT, 100)
    asked = sum(isinstance(message, Verify) for message in cluster.sent_to_target)
    assert cluster.generated == list(text[10:110])
    assert ended.timings.cache_hits > 10
    # The prompt's round needs no VERIFY. Its hit does, because nothing can be prepared while the prompt is read.
    assert asked == (ended.timings.rounds - 1) - (ended.timings.cache_hits - 1)


@pytest.mark.parametrize("max_tokens", [5, 6, 7, 8, 9])
def test_no_branch_is_prepared_at_or_past_the_end_of_the_request(max_tokens: int) -> None:
    text = random_text(14)
    cluster = Cluster(text, script(text, (0.9,)), depth=3)
    cluster.run(PROMPT, max_tokens, eos=frozenset({text[18]}))
    known = [message for message in cluster.sent_to_target if isinstance(message, Prepare)]
    assert known
    for message in known:
        for committed, following in zip(message.committed, message.chains, strict=True):
            assert text[18] not in committed
            assert message.base_len + len(committed) + len(following) < 10 + max_tokens
    assert cluster.generated == list(text[10 : 10 + min(max_tokens, 9)])


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_chains_end_before_an_end_token(mode: str) -> None:
    """If the target chooses it, the text ends there in any case, and later tokens don't count."""
    text = random_text(13)
    eos = next(token for token in text[60:] if text.count(token) == 1)
    cluster = Cluster(text, script(text, (1.0,)), ngrams=False)
    assert cluster.run(PROMPT, 300, mode, eos=frozenset({eos})).reason == "eos"
    assert cluster.generated == list(text[10 : text.index(eos) + 1])
    chains = [message.chain for message in cluster.sent_to_target if isinstance(message, Verify)]
    prepared = [message.chains for message in cluster.sent_to_target if isinstance(message, Prepare)]
    assert max(map(len, chains)) == 3 and not any(eos in chain for chain in itertools.chain(chains, *prepared))


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_copies_end_before_an_end_token(mode: str) -> None:
    """Such as that of an earlier message of a conversation."""
    text = (21, 22, 23, 24, 25, 26, 9) * 4
    cluster = Cluster(text, script(text, (0.1,)))
    assert cluster.run(text[:10], 300, mode, eos=frozenset({9})).reason == "eos"
    assert cluster.generated == list(text[10:14])
    verified = [message.chain for message in cluster.sent_to_target if isinstance(message, Verify)]
    prepared = [message.chains for message in cluster.sent_to_target if isinstance(message, Prepare)]
    chains = [chain for chain in itertools.chain(verified, *prepared) if chain]
    assert (mode == "ssd" or (25, 26) in chains) and not any(9 in chain for chain in chains)


def test_branches_past_an_end_token_are_not_prepared() -> None:
    text = random_text(16)
    cluster = Cluster(text, script(text))
    cluster.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=50), "ssd", frozenset({7})), 0)
    entries = (Branch((7,), (8, 9)), Branch((5,), (8, 9, 10)))
    cluster.rounds.handle([("draft-0", Branches("r", 0, 0, len(PROMPT), entries, Span(0, 1), final=True))], 0)
    known = [message for message in cluster.sent_to_target if isinstance(message, Prepare)]
    assert [(message.committed, message.chains) for message in known] == [(((5,),), ((8, 9, 10),))]


@pytest.mark.parametrize("max_tokens", [40, 41, 42, 200])
def test_target_continues_by_itself_after_hit_and_miss(max_tokens: int) -> None:
    """Waiting for the drafter would not pay, so the target needs no message until the end is near."""
    text = random_text(23)
    end, verifies = text[150], []
    for ngrams in (False, True):
        cluster = Cluster(text, script(text, (0.4,), (0.4,)))
        cluster.target_abilities = Abilities(ngrams=ngrams)
        cluster.rounds._planner.estimates.observe_draft(1, 100.0)
        ended = cluster.run(PROMPT, max_tokens, eos=frozenset({end}))
        assert cluster.generated == list(text[10 : min(10 + max_tokens, text.index(end, 10) + 1)])
        assert ended.timings.cache_misses and ended.timings.cache_hits
        verifies.append(sum(isinstance(message, Verify) for message in cluster.sent_to_target))
    assert verifies[1] < verifies[0] / 3


def test_plain_decoding_needs_no_messages_until_a_trial() -> None:
    text = random_text(11)
    plain = Cluster(text, None, ngrams=False)
    plain.run(PROMPT, 100, "auto")
    assert plain.generated == list(text[10:110])
    assert len([message for message in plain.sent_to_target if isinstance(message, Verify)]) == 1

    trying = Cluster(text, script(text, (0.1,), (0.1,)))
    trying.run(PROMPT, 300, "auto")
    halts = [message for message in trying.sent_to_target if isinstance(message, Halt)]
    plain_runs = [message for message in trying.sent_to_target if isinstance(message, Verify) and message.autonomous]
    assert trying.generated == list(text[10:310]) and 0 < len(halts) <= len(plain_runs)


def test_rounds_that_are_handled_together_count_with_their_own_times() -> None:
    """A target that continues by itself may end two rounds before the orchestrator runs again."""
    text = random_text(11)
    cluster = Cluster(text, None, ngrams=False)
    cluster.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=201), "auto", frozenset()), 0)
    cluster._turn()
    cluster._turn()
    for now_ns in range(2 * TURN_NS, 202 * TURN_NS, 2 * TURN_NS):
        ended = [outcome for _ in range(2) if (outcome := cluster.target.step()) is not None]
        cluster.rounds.handle([("target-0", outcome) for outcome in ended], now_ns)
    rounds = cluster.rounds.metrics.rounds.snapshot()
    assert cluster.generated == list(text[10:211]) and rounds.counts[bisect_left(DURATION_BOUNDS_MS, 10)] >= 199
    (note,) = next(event.notes for event in cluster.events if isinstance(event, RequestEnded))
    assert "measured (100 tokens/s)" in note


def test_target_uses_all_cores_in_auto_only() -> None:
    """Mode ar uses the same cores as the other modes, so that it can be compared with them."""
    text = random_text(11)
    auto, plain = Cluster(text, script(text)), Cluster(text, script(text))
    auto.run(PROMPT, 300, "auto")
    plain.run(PROMPT, 100, "ar")
    verifies = [message for message in auto.sent_to_target if isinstance(message, Verify)]
    assert {message.all_cores for message in verifies} == {True, False}
    assert all(message.all_cores for message in verifies if message.autonomous)
    assert not any(isinstance(message, Verify) and message.all_cores for message in plain.sent_to_target)


def test_drafts_that_copies_replace_are_judged_by_the_text() -> None:
    """In a text that repeats itself, copies are verified in place of most drafts, which are as good as in any other."""
    text = PROMPT + random_text(3, 40)[10:] * 10
    cluster = Cluster(text, script(text, (0.6,), (0.6,)))
    ended = cluster.run(PROMPT, 300)
    drafted = cluster.rounds._planner.estimates.drafted
    assert ended.timings.ngram_chains > ended.timings.rounds / 4 and 0.45 < drafted.rate(0) < 0.75


@pytest.mark.parametrize("all_cores", [True, False])
def test_mode_ar_gives_no_estimate_of_a_target_that_uses_all_cores(all_cores: bool) -> None:
    text = random_text(11)
    cluster = Cluster(text, script(text))
    cluster.target_abilities = Abilities(all_cores=all_cores)
    cluster.run(PROMPT, 100, "ar")
    assert bool(cluster.rounds._planner.estimates.pipelined_ms.points) != all_cores


@pytest.mark.parametrize(
    ("plan", "alone", "together"),
    [
        (Arm("ar", 1), True, True),
        (Arm("sd", 3, drafter=NGRAM), True, True),
        (Arm("sd", 3, drafter="mtp"), True, True),
        (Arm("sd", 3), True, False),  # with several requests one is drafted for while another is verified
        (Arm("ssd", 3, 16), False, False),
        (Arm("ssd", 3, 16, "mtp"), False, False),
    ],
)
def test_target_uses_all_cores_in_auto_while_drafters_rest(plan: Arm, alone: bool, together: bool) -> None:
    planner = Planner(round_settings(8, 16))
    for active, expected in ((1, alone), (4, together)):
        planner.estimates.active = active
        for mode in ("auto", "sd"):
            admit = Admit("r", PROMPT, SamplingParams(), mode, frozenset())
            request = cast(Request, SimpleNamespace(plan=plan, admit=admit))
            assert planner.drafters_are_idle(request) == (expected and mode == "auto")


def test_ngram_drafting_decodes_plainly_until_a_copy_is_found() -> None:
    text = random_text(11)[:80] + random_text(11)[10:80] * 3
    cluster = Cluster(text, None)
    cluster.run(PROMPT, 250, "sd")
    verifies = [message for message in cluster.sent_to_target if isinstance(message, Verify)]
    assert cluster.generated == list(text[10:260])
    assert any(message.autonomous for message in verifies)
    assert sum(len(message.chain) for message in verifies) > 100
    assert len(verifies) < 100  # neither a message for every plain token, nor one for every copied token


def test_nothing_is_prepared_for_residual_sampling() -> None:
    text = random_text(15)
    cluster = Cluster(text, script(text))
    cluster.run(PROMPT, 60, sampling=SamplingParams(temp=1.0, rule="residual"))
    assert not [message for message in cluster.sent_to_target if isinstance(message, Prepare)]


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_ngrams_without_a_drafter_generate_the_targets_text(mode: str) -> None:
    text = PROMPT + tuple(random_text(9)[10:40]) * 8
    cluster = Cluster(text, None)
    ended = cluster.run(PROMPT, 200, mode)
    assert cluster.generated == list(text[10:210])
    assert ended.timings.ngram_chains > 0
    assert ended.timings.draft_n_accepted > 80


@matrix(seed=range(4), kind=[Branches, Drafted, Commit, Prepare], mode=["sd", "ssd", "auto"])
def test_lost_messages_do_not_change_the_text(seed: int, kind: type[Message], mode: str) -> None:
    rng = random.Random(seed)
    text = random_text(seed)
    cluster = Cluster(text, script(text), drop=lambda message: isinstance(message, kind) and rng.random() < 0.3)
    cluster.run(PROMPT, 80, mode)
    assert cluster.generated == list(text[10:90])


@pytest.mark.parametrize("mode", ["sd", "ssd", "auto"])
def test_no_time_that_a_drafter_reports_stalls_a_request(mode: str) -> None:
    text, drafts = random_text(5), count()
    cluster = Cluster(text, script(text), ngrams=False)

    def report_years(sender: str, message: Message, now_ns: int) -> None:
        if isinstance(message, Branches | Drafted):
            if next(drafts) > 2:
                return  # it stops answering
            message = structs.replace(message, work=Span(0, 10**18))
        if isinstance(message, Drafted):
            message = structs.replace(message, chain=message.chain[:1], odds=())
        handle(sender, message, now_ns)
        waits = [request.round.wait for request in cluster.rounds._requests.values()]
        assert max((wait.deadline_ns - now_ns for wait in waits if wait), default=0) <= MAX_WAIT_MS * MILLISECOND_NS

    handle = intercept(cluster.rounds, report_years)
    cluster.run(PROMPT, 60, mode)
    assert cluster.generated == list(text[10:70])


def test_target_finishes_without_a_lost_drafter() -> None:
    text = random_text(10)
    cluster = Cluster(text, script(text))
    turns = iter(range(1000))
    original = cluster._turn

    def turn() -> None:
        original()
        if next(turns) == 5:
            cluster.rounds.on_drafter_lost("draft-0", "it was lost", 0)
            cluster.workers.clear()

    cluster._turn = turn  # type: ignore[method-assign]
    ended = cluster.run(PROMPT, 100)
    assert cluster.generated == list(text[10:110])
    assert any("lost" in record for record in ended.notes)


@pytest.mark.parametrize("message_after_fault", [Resync("r", 0), Fault("r", "again")])
def test_messages_of_a_dropped_drafter_are_ignored(message_after_fault: Message) -> None:
    text = random_text(13)
    cluster = Cluster(text, script(text), ngrams=False)
    senders: list[str] = []

    def fails(sender: str, message: Message, now_ns: int) -> None:
        handle(sender, message, now_ns)
        senders.append(sender)
        if len(senders) == 20:
            handle("draft-0", Fault("r", "the context is full"), now_ns)
            handle("draft-0", message_after_fault, now_ns)

    handle = intercept(cluster.rounds, fails)
    cluster.run(PROMPT, 80)
    assert cluster.generated == list(text[10:90])
    assert sum(isinstance(message, Open) for message in cluster.sent_to_target) == 1


def test_resync_sends_the_drafter_all_tokens_once() -> None:
    text = random_text(14)
    cluster = Cluster(text, script(text), ngrams=False, steps=0)
    to_drafter: list[Message] = []
    send = cluster.send_worker

    def record(name: str, message: Message) -> None:
        to_drafter.append(message)
        send(name, message)

    cluster.send_worker = record  # type: ignore[method-assign]
    cluster.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=50), "ssd", frozenset()), 0)
    for _ in range(6):
        cluster._turn()
    cluster.rounds.handle([("draft-0", Resync("r", 0))], 0)
    opened, tokens = [m for m in to_drafter if isinstance(m, Open)][-1], cluster.rounds._requests["r"].sequence.tokens
    assert opened.tokens.tolist() == tokens
    since = len(to_drafter)
    for _ in range(6):
        cluster._turn()
    known = [token for m in to_drafter[since:] if isinstance(m, Commit) for token in m.tokens]
    assert known and known == tokens[len(opened.tokens) :][: len(known)]


@pytest.mark.parametrize("sender", ["target-0", "draft-0"])
def test_worker_note_is_reported_once_with_the_result(sender: str) -> None:
    text = random_text(12)
    cluster, numbers = Cluster(text, script(text)), count()

    def add_notes(name: str, message: Message, now_ns: int) -> None:
        handle(sender, WorkerNote(f"the times are wrong, at {next(numbers)}"), now_ns)
        handle("draft-7", WorkerNote("I have no part in this"), now_ns)
        handle(name, message, now_ns)

    handle = intercept(cluster.rounds, add_notes)
    ended = cluster.run(PROMPT, 50)
    assert cluster.generated == list(text[10:60])
    assert ended.notes == (f"{sender}: the times are wrong, at 0",)


def test_stale_and_duplicate_messages_are_dropped_and_counted() -> None:
    text = random_text(11)
    cluster = Cluster(text, script(text))
    seen: list[tuple[str, Message]] = []

    def handle_twice(sender: str, message: Message, now_ns: int) -> None:
        seen.append((sender, message))
        handle(sender, message, now_ns)
        handle(*seen[len(seen) // 2], now_ns)

    handle = intercept(cluster.rounds, handle_twice)
    cluster.run(PROMPT, 60)
    assert cluster.generated == list(text[10:70])
    assert cluster.rounds.stale > 0


def test_lost_round_is_sent_again_once_per_timeout() -> None:
    """A slow target is not sent the round again at every tick."""
    text = random_text(3)
    cluster = Cluster(text, script(text))
    cluster.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=50), "ar", frozenset()), 0)
    sent = []
    for now_ns in (OUTCOME_TIMEOUT_NS - 1, OUTCOME_TIMEOUT_NS, OUTCOME_TIMEOUT_NS + 1, 2 * OUTCOME_TIMEOUT_NS):
        cluster.rounds.on_tick(now_ns)
        sent.append(sum(isinstance(message, Verify) for message in cluster.sent_to_target))
    assert sent == [0, 1, 1, 2]


def test_long_prompt_is_indexed_in_pieces_after_open_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_text(17)
    cluster = Cluster(text, script(text))
    read: list[tuple[int, bool]] = []
    index_more = NgramIndex.index_more

    def record_read(index: NgramIndex, count: int) -> None:
        if not index.is_empty:
            read.append((count, any(isinstance(message, Open) for message in cluster.sent_to_target)))
        index_more(index, count)

    monkeypatch.setattr(NgramIndex, "index_more", record_read)
    cluster.rounds.begin(Admit("r", PROMPT * 1000, SamplingParams(max_tokens=50), "ssd", frozenset()), 0)
    assert cluster.rounds.next_deadline_ns() == 0
    turns = 0
    while cluster.rounds.next_deadline_ns() == 0:
        cluster.rounds.on_tick(0)
        turns += 1
    assert turns > 30
    assert all(opened and count <= INDEX_PIECE_TOKENS for count, opened in read)


def test_full_depth_branch_after_its_outcome_counts_as_late() -> None:
    text = random_text(18)
    cluster = Cluster(text, script(text, (1.0,)), depth=3, full_depth=True, ngrams=False, steps=0)
    arrived: list[bool] = []  # by outcome: whether its branch had arrived
    on_outcome = cluster.rounds._on_outcome

    def record_arrival(request: Request, outcome: Outcome, now_ns: int) -> list[SettledRound]:
        committed = (*request.round.proposal.chain[: outcome.accepted], outcome.bonus)
        arrived.append(request.draft.cache.lookup(committed) is not None)
        return on_outcome(request, outcome, now_ns)

    cluster.rounds._on_outcome = record_arrival  # type: ignore[method-assign]
    timings = cluster.run(PROMPT, 60).timings
    assert (timings.cache_hits, timings.cache_late) == (arrived[:-1].count(True), arrived[:-1].count(False))
    assert timings.cache_late > 5
