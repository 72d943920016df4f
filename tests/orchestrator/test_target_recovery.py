"""Requests whose drafter or target dies and is restarted, with the real scheduler and draft worker."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from outrider.orchestrator.events import Committed, RequestEnded
from outrider.protocol.codec import encode
from outrider.protocol.messages import Done, Failed, Fault, Hello, Message, Open, Prefilled, Resync, Verify
from tests.orchestrator.failing_cluster import FailingCluster, random_text
from tests.pairwise import matrix

pytestmark = pytest.mark.usefixtures("counted_clock")

WORKERS = (
    (FailingCluster.kill_drafter, FailingCluster.restart_drafter),
    (FailingCluster.kill_target, FailingCluster.restart_target),
)
MODES = ("ar", "sd", "ssd", "auto")
every_mode = pytest.mark.parametrize("mode", MODES)


def expected_tokens(cluster: FailingCluster, name: str = "r0", length: int = 60) -> list[int]:
    return list(cluster.texts[name][11 : 11 + length])


# --- the drafter --------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("seed", range(4))
def test_drafter_that_dies_and_returns_changes_no_token(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    cluster = FailingCluster([random_text(1), random_text(2)])
    cluster.begin(mode)
    for _ in range(4):
        cluster.run_turns(rng.randrange(1, 12))
        cluster.kill_drafter()
        cluster.run_turns(rng.randrange(0, 6))
        cluster.restart_drafter()
    cluster.run_to_end()
    for name in cluster.texts:
        assert cluster.text_of(name) == expected_tokens(cluster, name)


@pytest.mark.parametrize("ngrams", [True, False])
def test_returning_drafter_gets_hits_in_the_same_request(ngrams: bool) -> None:
    cluster = FailingCluster([random_text(1)], ngrams=ngrams)
    cluster.begin("ssd", 200)
    cluster.run_turns(10)
    cluster.kill_drafter()
    before = cluster.rounds._requests["r0"].metrics.timings(11, 300).cache_hits
    cluster.run_turns(5)
    cluster.restart_drafter()
    cluster.run_to_end()
    ended = cluster.end("r0")
    assert isinstance(ended, RequestEnded) and cluster.text_of("r0") == expected_tokens(cluster, length=200)
    assert ended.timings.cache_hits > before + 10
    assert ended.timings.rejoined == 1
    assert ended.notes == ("speculation: draft worker draft-0 ended with code -9", "speculation: draft-0 drafts again")


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_drafter_that_answers_between_its_deaths_is_taken_back(mode: str) -> None:
    cluster = FailingCluster([random_text(1)], ngrams=False)
    cluster.begin(mode, 300)
    for _ in range(3):
        cluster.run_turns(20)
        cluster.kill_drafter()
        cluster.run_turns(3)
        cluster.restart_drafter()
    assert cluster.rounds._requests["r0"].draft.drafters


@pytest.mark.parametrize("sender", ["draft-0", "target-0"])
def test_late_fault_of_an_earlier_epoch_ends_neither_the_text_nor_its_drafting(sender: str) -> None:
    """The drafter failed, or the target after it had asked to start again; then the text began again."""
    cluster = FailingCluster([random_text(1)], ngrams=False)
    cluster.begin("ssd", 100)
    cluster.run_turns(10)
    cluster.rounds.handle([("target-0", Resync("r0", 0)), (sender, Fault("r0", "out of memory"))], cluster._now)
    assert cluster.rounds._requests["r0"].draft.drafters
    cluster.run_to_end()
    assert cluster.text_of("r0") == expected_tokens(cluster, length=100)


def test_long_reason_of_a_death_is_shortened_to_what_a_message_can_carry() -> None:
    """The reason may contain a line of the worker's log."""
    cluster = FailingCluster([random_text(1)])
    cluster.begin("ssd")
    cluster.run_turns(5)
    cluster.rounds.on_drafter_lost("draft-0", "x" * 5000, 0)
    cluster.workers.clear()
    cluster.run_to_end()
    ended = cluster.end("r0")
    assert isinstance(ended, RequestEnded)
    encode(Done("q", ended.reason, ended.timings, ended.notes))


def test_request_waiting_for_a_dead_drafter_continues_at_once() -> None:
    cluster = FailingCluster([random_text(1)], ngrams=False, steps=0)
    cluster.begin("sd")
    while cluster.rounds._requests["r0"].round.wait is None:
        cluster._turn()
    sent = len(cluster.sent_to_target)
    cluster.kill_drafter()
    assert [type(message) for message in cluster.sent_to_target[sent:]] == [Verify]


@pytest.mark.parametrize("mode", ["sd", "ssd", "auto"])
def test_request_started_without_a_drafter_uses_one_that_joins(mode: str) -> None:
    cluster = FailingCluster([random_text(1)], ngrams=False)
    cluster.kill_drafter()
    cluster.begin(mode, 300)
    cluster.run_turns(5)
    cluster.restart_drafter()
    cluster.run_to_end()
    ended = cluster.end("r0")
    assert isinstance(ended, RequestEnded) and ended.timings.draft_n_accepted > 0
    assert cluster.text_of("r0") == expected_tokens(cluster, length=300)


def test_ar_request_does_not_use_a_joining_drafter() -> None:
    cluster = FailingCluster([random_text(1)])
    cluster.kill_drafter()
    cluster.begin("ar")
    cluster.run_turns(5)
    cluster.restart_drafter()
    cluster.run_to_end()
    ended = cluster.end("r0")
    assert isinstance(ended, RequestEnded) and (ended.timings.rejoined, ended.notes) == (0, ())


def test_request_that_seems_to_kill_drafters_continues_without_them() -> None:
    cluster = FailingCluster([random_text(1)])
    cluster.begin("ssd")
    cluster.run_turns(3)
    for _ in range(4):
        cluster.kill_drafter()
        cluster.restart_drafter()
    assert not cluster.rounds._requests["r0"].draft.drafters
    assert cluster.rounds._requests["r0"].metrics.rejoined == 1
    cluster.run_to_end()
    assert cluster.text_of("r0") == expected_tokens(cluster)


# --- the target ---------------------------------------------------------------------------------------------------


@matrix(mode=MODES, seed=range(4), ngrams=[True, False])
def test_target_that_dies_and_returns_changes_no_token(mode: str, seed: int, ngrams: bool) -> None:
    rng = random.Random(seed)
    cluster = FailingCluster([random_text(1), random_text(2), random_text(3)], ngrams=ngrams)
    cluster.begin(mode)
    for _ in range(3):
        cluster.run_turns(rng.randrange(1, 25))
        cluster.kill_target()
        cluster.run_turns(rng.randrange(0, 4))
        cluster.restart_target()
    cluster.run_to_end()
    for name in cluster.texts:
        ended = cluster.end(name)
        assert cluster.text_of(name) == expected_tokens(cluster, name)
        assert isinstance(ended, RequestEnded) and ended.timings.predicted_n == 60


@every_mode
@pytest.mark.parametrize("seed", range(4))
def test_random_deaths_of_target_and_drafter_change_no_token(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    cluster = FailingCluster([random_text(1), random_text(2)])
    cluster.begin(mode)
    for _ in range(5):
        cluster.run_turns(rng.randrange(2, 12))
        workers = dict.fromkeys(rng.choices(WORKERS, k=rng.randrange(1, 4)))
        for kill, _ in workers:
            kill(cluster)
            cluster.run_turns(rng.randrange(0, 3))
        for _, restart in workers:
            restart(cluster)
            cluster.run_turns(rng.randrange(0, 2))
    cluster.run_to_end()
    for name in cluster.texts:
        assert cluster.text_of(name) == expected_tokens(cluster, name)


def test_replacement_target_gets_committed_tokens_and_prompt_length() -> None:
    cluster = FailingCluster([random_text(1)])
    cluster.begin("ssd")
    cluster.run_turns(12)
    cluster.kill_target()
    tokens = cluster.text_of("r0")
    cluster.restart_target()
    opened = cluster.sent_to_target[-1]
    assert isinstance(opened, Open) and opened.tokens.tolist() == [*cluster.texts["r0"][:11], *tokens]
    assert (opened.prompt_len, opened.epoch) == (11, 1)


def test_late_messages_of_a_dead_target_and_drafters_are_dropped() -> None:
    cluster = FailingCluster([random_text(1)])
    cluster.begin("ssd")
    cluster.run_turns(12)
    late = list(cluster.target.answer(cluster._to_target[0])) if cluster._to_target else []
    cluster.kill_target()
    tokens, stale = cluster.text_of("r0"), cluster.rounds.stale
    for message in late:
        cluster.rounds.handle([("target-0", message)], 0)
    cluster._work(100)
    assert cluster.text_of("r0") == tokens and cluster.rounds.stale >= stale + len(late)


def test_outage_is_noted_and_does_not_affect_estimates() -> None:
    cluster = FailingCluster([random_text(1)])
    cluster.begin("ssd")
    cluster.run_turns(12)
    cluster.kill_target()
    cluster._now += 10**12
    estimates, tokens = cluster.rounds._planner.estimates, len(cluster.text_of("r0"))
    before = estimates.tokens_per_ms()
    cluster.restart_target()
    while len(cluster.text_of("r0")) == tokens:
        cluster._turn()
    assert estimates.tokens_per_ms() == before
    cluster.run_to_end()
    ended = cluster.end("r0")
    assert estimates.tokens_per_ms() not in (before, 0.0)
    assert isinstance(ended, RequestEnded) and ended.timings.resumed == 1
    assert ended.notes == ("the text continued after a pause: target worker target-0 ended with code -9",)


def test_request_during_an_outage_starts_with_the_next_target() -> None:
    cluster = FailingCluster([random_text(1), random_text(2)])
    cluster.kill_target()
    cluster.begin("ssd")
    cluster.run_turns(3)
    assert not any(isinstance(event, Committed) for event in cluster.events)
    cluster.run_to_end()
    for name in cluster.texts:
        ended = cluster.end(name)
        assert isinstance(ended, RequestEnded) and ended.timings.resumed == 0
        assert cluster.text_of(name) == expected_tokens(cluster, name)


def test_request_cancelled_during_an_outage_is_not_resumed() -> None:
    cluster = FailingCluster([random_text(1), random_text(2)])
    cluster.begin("ssd")
    cluster.run_turns(12)
    cluster.kill_target()
    cluster.rounds.stop("r0", "cancelled")
    cluster.run_to_end()
    assert cluster.opened[-1] == ["r1"] and cluster.text_of("r1") == expected_tokens(cluster, "r1")


def test_permanent_target_loss_fails_every_request_with_the_reason() -> None:
    cluster = FailingCluster([random_text(1), random_text(2)])
    cluster.begin("ssd")
    cluster.run_turns(12)
    cluster.kill_target(for_good=True)
    assert [cluster.end(name) for name in cluster.texts] == [
        Failed(name, "WorkerError", "target worker target-0 ended with code -9") for name in cluster.texts
    ]


# --- requests that kill the target --------------------------------------------------------------------------------


@matrix(mode=MODES, poisoned=["r0", "r2", "r3"], at=[0, 30])
def test_only_the_request_that_keeps_killing_the_target_fails(mode: str, poisoned: str, at: int) -> None:
    cluster = FailingCluster([random_text(n) for n in range(4)], poison={poisoned: at}, ngrams=False)
    cluster.begin(mode)
    cluster.run_to_end()
    ended = cluster.end(poisoned)
    assert isinstance(ended, Failed) and "the third time" in ended.message
    for name in set(cluster.texts) - {poisoned}:
        assert isinstance(cluster.end(name), RequestEnded) and cluster.text_of(name) == expected_tokens(cluster, name)
    assert cluster.deaths == 3 or at  # others that get tokens between two deaths are not suspected
    assert cluster.deaths <= 4


def test_suspect_requests_are_tried_one_at_a_time() -> None:
    cluster = FailingCluster([random_text(n) for n in range(3)])
    cluster.begin("ssd")
    for _ in range(2):
        cluster.kill_target()
        cluster.restart_target()
    for count in (1, 2, 3):
        assert len(cluster.opened[-1]) == count
        before = len(cluster.events)
        while not any(isinstance(event, Committed) for event in cluster.events[before:]):
            cluster._turn()
    assert sorted(cluster.opened[-1]) == ["r0", "r0", "r1", "r1", "r2", "r2"]
    cluster.run_to_end()
    for name in cluster.texts:
        assert cluster.text_of(name) == expected_tokens(cluster, name)


def test_new_request_waits_while_suspects_are_tried() -> None:
    cluster = FailingCluster([random_text(0)])
    cluster.begin("ssd")
    for _ in range(2):
        cluster.kill_target()
        cluster.restart_target()
    cluster.texts["r1"] = random_text(1)
    cluster.target.oracles["r1"] = type(cluster.target.oracles["r0"])(random_text(1))  # type: ignore[attr-defined]
    cluster.texts = {"r1": cluster.texts["r1"]}
    cluster.begin("ar")
    assert cluster.opened[-1] == ["r0"]
    cluster.run_to_end()
    assert cluster.opened[-1][:1] == ["r0"] and sorted(cluster.opened[-1]) == ["r0", "r0", "r1"]


def test_two_requests_that_kill_the_target_both_fail() -> None:
    cluster = FailingCluster([random_text(n) for n in range(4)], poison={"r1": 0, "r2": 0})
    cluster.begin("ssd")
    cluster.run_to_end()
    assert {name for name in cluster.texts if isinstance(cluster.end(name), Failed)} == {"r1", "r2"}


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_counts_are_right_after_target_deaths_during_drafter_waits(mode: str) -> None:
    """The previous round has ended and stays counted. The round that waits for the drafter has not begun."""
    cluster = FailingCluster([random_text(1)], ngrams=False)
    cluster.begin(mode, 120)
    for _ in range(5):
        while cluster.rounds.active and cluster.rounds._requests["r0"].round.wait is None:
            cluster._turn()
        cluster.kill_target()
        cluster.restart_target()
    cluster.run_to_end()
    ended = cluster.end("r0")
    assert isinstance(ended, RequestEnded) and len(ended.notes) == 1, "each reason is noted once"
    times = ended.timings
    followed = times.missed_then_plain + times.missed_then_copied + times.missed_then_drafted + times.cache_late
    committed = [event for event in cluster.events if isinstance(event, Committed)]
    assert cluster.text_of("r0") == expected_tokens(cluster, length=120) and times.resumed == 5
    assert times.cache_misses == followed and times.rounds == len(committed)


class PrefillingCluster(FailingCluster):
    """A failing cluster with a prefill worker that never finishes a prompt."""

    def prefill_workers(self) -> set[str]:
        return {"prefill-0"}

    def hello(self, name: str) -> Hello:
        return replace(super().hello(name), role="prefill" if name.startswith("prefill") else "draft")

    def send_worker(self, name: str, message: Message) -> None:
        self.sent_to_drafters.append((name, message))

    def begin_prompts(self) -> None:
        for request in list(self.rounds._requests.values()):
            if request.round.is_open:
                self.rounds.handle([("target-0", Prefilled(request.id, request.round.epoch, 0, 11))], 0)


def test_prefill_of_a_suspended_request_ends_with_its_target() -> None:
    """The death of its prefill worker must not resume it beside a request that is tried alone, or without a target."""
    cluster = PrefillingCluster([random_text(1), random_text(2)])
    cluster.begin("ar")
    for _ in range(2):
        cluster.begin_prompts()
        cluster.kill_target()
        cluster.restart_target()
    assert cluster.opened[-1] == ["r0"]
    sent = len(cluster.sent_to_target)
    cluster.rounds.on_prefill_worker_lost("prefill-0")
    assert not [message for message in cluster.sent_to_target[sent:] if message.request == "r1"]  # type: ignore[union-attr]
