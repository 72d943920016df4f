"""Prompts with the same beginning are read once: in sequence, together, and when the reading request ends."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from outrider.engine.kv_cache import FlatKVCache
from outrider.engine.loading import LoadedModel, load
from outrider.protocol import clock
from outrider.protocol.messages import (
    CacheReport,
    Close,
    DraftTokens,
    Fault,
    KvMemory,
    Open,
    Outcome,
    Prefilled,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import CacheUse
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, Idle, VirtualClock, run_worker

Bonus = Callable[[Sequence[int]], int]
ROOM = KvMemory(1 << 26)
SYSTEM = [(31 * i) % 250 + 2 for i in range(700)]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> LoadedModel:
    return load(tiny_model("llama", seed=4))


class WorkerUnderTest:
    """A target worker, all its answers, and what they say about the prompt cache."""

    def __init__(self, model: LoadedModel, *begin: Any) -> None:
        self.link = FakeLink("target-0")
        self.worker = TargetWorker(self.link, model)  # type: ignore[arg-type]
        self.answers: list[Any] = []
        self.exchange(*begin)

    def exchange(self, *messages: Any, turns: int = 1000) -> list[Any]:
        answers = run_worker(self.worker, self.link, messages, turns)
        self.answers += answers
        return answers

    def by_request(self, kind: type) -> dict[str, Any]:
        """The last answer of this class to each request."""
        return {answer.request: answer for answer in self.answers if isinstance(answer, kind)}

    @property
    def cached(self) -> dict[str, int]:
        answers = [answer for answer in self.answers if isinstance(answer, Prefilled)]
        return {answer.request: answer.cached for answer in answers if answer.cached}

    @property
    def use(self) -> CacheUse:
        return [answer for answer in self.answers if isinstance(answer, CacheReport)][-1].use


def open_request(request: str, tokens: Sequence[int]) -> Open:
    return Open(request, 0, 0, np.array(tokens, np.int32), SamplingParams(max_tokens=8, temp=0.8, seed=3))


@pytest.fixture(scope="module")
def bonus(model: LoadedModel) -> Callable[[Sequence[int]], int]:
    """`bonus(tokens)`: the first token of a worker without a prompt cache."""
    cold = WorkerUnderTest(model)

    def first_token(tokens: Sequence[int]) -> int:
        answers = cold.exchange(Close("r"), open_request("r", tokens))
        (outcome,) = [answer for answer in answers if isinstance(answer, Outcome)]
        return outcome.bonus

    return first_token


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each forward."""
    counts: list[int] = []
    forward = FlatKVCache.forward

    def counted(self: FlatKVCache, feeds: Any) -> mx.array:
        counts.append(sum(feed.count for feed in feeds))
        return forward(self, feeds)

    monkeypatch.setattr(FlatKVCache, "forward", counted)
    return counts


def test_shared_prefix_of_concurrent_prompts_is_read_once(model: LoadedModel, bonus: Bonus, fed: list[int]) -> None:
    prompts = {f"r{n}": [*SYSTEM, *range(20 + n, 30 + 2 * n)] for n in range(5)}
    worker_under_test = WorkerUnderTest(model, ROOM)
    fed.clear()
    worker_under_test.exchange(*(open_request(name, tokens) for name, tokens in prompts.items()))
    assert sum(fed) < len(SYSTEM) + 5 * 20
    assert worker_under_test.cached.keys() == prompts.keys() - {"r0"} and min(worker_under_test.cached.values()) >= len(
        SYSTEM
    )
    bonuses = {name: outcome.bonus for name, outcome in worker_under_test.by_request(Outcome).items()}
    assert bonuses == {name: bonus(tokens) for name, tokens in prompts.items()}


@pytest.mark.parametrize("turns", [0, 1])
def test_waiting_request_continues_where_a_closed_reader_left_off(model: LoadedModel, bonus: Bonus, turns: int) -> None:
    worker_under_test, other = WorkerUnderTest(model, ROOM), [*SYSTEM, 9]
    worker_under_test.exchange(open_request("gone", [*SYSTEM, 5, 6, 7]), open_request("stays", other), turns=turns)
    worker_under_test.exchange(Close("gone"))
    assert worker_under_test.by_request(Outcome)["stays"].bonus == bonus(other)
    assert worker_under_test.cached == ({"stays": 512} if turns else {})


def test_prompt_cache_evicts_for_texts_and_accounts_for_its_bytes(model: LoadedModel) -> None:
    """Entries are evicted for running texts and for newer entries; running texts free their reservation at the end."""
    each = TargetWorker(FakeLink("t"), model).kv  # type: ignore[arg-type]
    worker_under_test = WorkerUnderTest(model, KvMemory(each.of(1000)))
    for n in range(6):
        worker_under_test.exchange(open_request(f"r{n}", SYSTEM[40 * n : 40 * n + 300]))
        worker_under_test.exchange(Close(f"r{n}"))
        assert worker_under_test.use.bytes == each.of(300) * worker_under_test.use.entries <= each.of(1000)
    assert worker_under_test.use.entries == 3
    worker_under_test.exchange(open_request("long", [7] * 900))
    assert worker_under_test.use.entries == 0
    worker_under_test.exchange(Close("long"))
    assert worker_under_test.use.entries == 1
    worker_under_test.exchange(KvMemory(each.of(1000), prompt_cache=False))
    assert worker_under_test.use.entries == 0 and worker_under_test.use.bytes == 0
    worker_under_test.exchange(open_request("again", [7] * 900))
    assert not worker_under_test.cached


def test_prompt_of_a_failed_request_is_not_cached(
    model: LoadedModel, bonus: Bonus, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_under_test, prompt = WorkerUnderTest(model, ROOM), [*SYSTEM[:60], 5]
    with monkeypatch.context() as broken:
        broken.setattr("outrider.engine.verify.BatchForward._choose_group", lambda *_: mx.full((1,), -1, mx.int32))
        worker_under_test.exchange(open_request("bad", prompt))
    assert "NaN or infinite" in worker_under_test.by_request(Fault)["bad"].message
    worker_under_test.exchange(open_request("good", prompt))
    assert not worker_under_test.cached and worker_under_test.by_request(Outcome)["good"].bonus == bonus(prompt)


def test_prefix_that_can_not_be_copied_ends_only_the_request_that_needs_it(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as when memory is short while the rows of another running text are copied."""
    worker_under_test = WorkerUnderTest(model, ROOM, open_request("first", [*SYSTEM[:60], 5]))
    prompt = [*SYSTEM[:60], 9]
    with monkeypatch.context() as broken:
        broken.setattr(FlatKVCache, "segment", lambda *_: mx.zeros(-1))
        worker_under_test.exchange(open_request("second", prompt), Close("first"))
    assert "copying from the prompt cache failed" in worker_under_test.by_request(Fault)["second"].message
    worker_under_test.exchange(open_request("third", prompt))
    assert "third" in worker_under_test.by_request(Outcome) and not worker_under_test.cached


def test_reopened_request_reads_only_new_tokens(model: LoadedModel) -> None:
    worker_under_test, tokens = WorkerUnderTest(model, ROOM), [*SYSTEM[:200], 4]
    worker_under_test.exchange(open_request("r", tokens))
    anew = Open("r", 1, 3, np.array([*tokens, 8, 9], np.int32), SamplingParams(max_tokens=8))
    worker_under_test.exchange(anew)
    assert worker_under_test.cached == {"r": 201}


def test_finished_and_cancelled_requests_free_all_their_rows(model: LoadedModel) -> None:
    """A short form of `tests.harness.soak`: every row is freed, and every byte that is not a cache entry's."""
    draws, each = random.Random(1), TargetWorker(FakeLink("t"), model).kv  # type: ignore[arg-type]
    worker_under_test, running = WorkerUnderTest(model, KvMemory(each.of(1000))), deque[str]()
    for number in range(40):
        tokens = SYSTEM[draws.choice((0, number)) :][: draws.randint(1, 120)]
        running.append(f"r{number}")
        worker_under_test.exchange(open_request(running[-1], tokens), turns=draws.randint(0, 3))
        if len(running) > draws.randint(0, 4):
            worker_under_test.exchange(Close(running.popleft()), turns=1)
    worker_under_test.exchange(*(Close(name) for name in running))
    assert not worker_under_test.by_request(Fault) and 0 < worker_under_test.use.bytes <= each.of(1000)
    worker_under_test.exchange(open_request("long", [7] * 990))
    assert worker_under_test.use.bytes == 0, "only this request has reserved memory"
    worker_under_test.exchange(Close("long"), KvMemory(0))
    assert not worker_under_test.worker._kv_cache._sequences, "every row was given back"


def test_request_that_waits_for_a_prefix_read_elsewhere_leaves_the_worker_idle(model: LoadedModel) -> None:
    """It waits for a common prefix that a prefill worker may read; until then the worker has nothing to do."""
    link = FakeLink("target-0")
    worker = TargetWorker(link, model)  # type: ignore[arg-type]
    link.inbox.append(ROOM)
    for name in ("read-elsewhere", "waits"):
        link.inbox.append(replace(open_request(name, SYSTEM), offered=True))
        with pytest.raises(Idle):
            for _ in range(20):
                worker.turn()


def test_lost_close_of_a_request_that_is_read_elsewhere_stalls_no_other(
    model: LoadedModel, bonus: Bonus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message about it follows. When the waiting request's VERIFY is repeated, the target reads the prefix."""
    virtual = VirtualClock()
    monkeypatch.setattr(clock, "now", virtual)
    worker_under_test = WorkerUnderTest(model, ROOM)
    for name in ("lost", "waits"):
        worker_under_test.exchange(replace(open_request(name, SYSTEM), offered=True))
    worker_under_test.exchange(Verify("waits", 0, 0, len(SYSTEM)))  # a prefill worker may still read the first one
    assert not worker_under_test.by_request(Outcome)
    virtual.skip(clock.OUTCOME_TIMEOUT_NS)
    worker_under_test.exchange(Verify("waits", 0, 0, len(SYSTEM)))
    assert worker_under_test.by_request(Outcome)["waits"].bonus == bonus(SYSTEM)
    assert worker_under_test.cached["waits"] == len(SYSTEM) - 1


def test_request_that_waits_for_a_prefill_worker_is_closed_after_long_silence(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    virtual = VirtualClock()
    monkeypatch.setattr(clock, "now", virtual)
    worker_under_test = WorkerUnderTest(model, ROOM)
    worker_under_test.exchange(replace(open_request("lost", SYSTEM), offered=True))
    virtual.skip(clock.IDLE_REQUEST_TIMEOUT_NS)
    worker_under_test.exchange(open_request("next", SYSTEM[::-1]))
    assert list(worker_under_test.worker._running) == ["next"]


def test_rest_of_a_prompt_that_waited_for_a_prefix_is_offered_to_prefill_workers(
    model: LoadedModel, bonus: Bonus
) -> None:
    """Otherwise a prefill worker would read what the target reads itself."""
    worker_under_test, rest = WorkerUnderTest(model, ROOM), [*SYSTEM, *range(20, 60)]
    worker_under_test.exchange(
        open_request("reads", SYSTEM), replace(open_request("stays", rest), offered=True), turns=1
    )
    assert "stays" not in worker_under_test.by_request(Prefilled), "no prefill worker may read the common part"
    worker_under_test.exchange()
    assert worker_under_test.by_request(Prefilled)["stays"].done >= len(SYSTEM) - 1
    assert "stays" not in worker_under_test.by_request(Outcome), "it waits for the orchestrator's decision"
    worker_under_test.exchange(Verify("stays", 0, 0, len(rest), DraftTokens()))
    assert worker_under_test.by_request(Outcome)["stays"].bonus == bonus(rest)
