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

from outrider.engine.kv_cache import FlatKVCache
from outrider.engine.loading import LoadedModel, load
from outrider.protocol.messages import CacheReport, Close, Fault, KvMemory, Open, Outcome, Prefilled
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import CacheUse
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, answered

Bonus = Callable[[Sequence[int]], int]
ROOM = KvMemory(1 << 26)
SYSTEM = [(31 * i) % 250 + 2 for i in range(700)]


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> LoadedModel:
    return load(tiny_model("llama", seed=4))


class Bench:
    """A worker, what it answers, and how many tokens its model was fed."""

    def __init__(self, model: LoadedModel, *begin: Any) -> None:
        self.link = FakeLink("target-0")
        self.worker = TargetWorker(self.link, model)  # type: ignore[arg-type]
        self.answers: list[Any] = []
        self.say(*begin)

    def say(self, *messages: Any, turns: int = 1000) -> list[Any]:
        told = answered(self.worker, self.link, messages, turns)
        self.answers += told
        return told

    def told(self, kind: type) -> dict[str, Any]:
        return {answer.request: answer for answer in self.answers if isinstance(answer, kind)}

    @property
    def cached(self) -> dict[str, int]:
        told = [answer for answer in self.answers if isinstance(answer, Prefilled)]
        return {answer.request: answer.cached for answer in told if answer.cached}

    @property
    def use(self) -> CacheUse:
        return [answer for answer in self.answers if isinstance(answer, CacheReport)][-1].use


def asked(request: str, tokens: Sequence[int]) -> Open:
    return Open(request, 0, 0, np.array(tokens, np.int32), SamplingParams(max_tokens=8, temp=0.8, seed=3))


@pytest.fixture(scope="module")
def bonus(model: LoadedModel) -> Callable[[Sequence[int]], int]:
    """What a worker without a cache says."""
    cold = Bench(model)

    def said(tokens: Sequence[int]) -> int:
        (outcome,) = [told for told in cold.say(Close("r"), asked("r", tokens)) if isinstance(told, Outcome)]
        return outcome.bonus

    return said


@pytest.fixture
def fed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each forward."""
    counts: list[int] = []
    forward = FlatKVCache.forward

    def counted(self: FlatKVCache, feeds: Any) -> mx.array:
        counts.append(sum(feed.count for feed in feeds))
        return forward(self, feeds)

    monkeypatch.setattr(FlatKVCache, "forward", counted)
    return counts


def test_many_that_arrive_together_read_what_they_share_once(model: LoadedModel, bonus: Bonus, fed: list[int]) -> None:
    prompts = {f"r{n}": [*SYSTEM, *range(20 + n, 30 + 2 * n)] for n in range(5)}
    bench = Bench(model, ROOM)
    fed.clear()
    bench.say(*(asked(name, tokens) for name, tokens in prompts.items()))
    assert sum(fed) < len(SYSTEM) + 5 * 20
    assert bench.cached.keys() == prompts.keys() - {"r0"} and min(bench.cached.values()) >= len(SYSTEM)
    said = {name: outcome.bonus for name, outcome in bench.told(Outcome).items()}
    assert said == {name: bonus(tokens) for name, tokens in prompts.items()}


@pytest.mark.parametrize("turns", [0, 1])
def test_who_waits_reads_on_where_a_reader_left_off(model: LoadedModel, bonus: Bonus, turns: int) -> None:
    bench, other = Bench(model, ROOM), [*SYSTEM, 9]
    bench.say(asked("gone", [*SYSTEM, 5, 6, 7]), asked("stays", other), turns=turns)
    bench.say(Close("gone"))
    assert bench.told(Outcome)["stays"].bonus == bonus(other)
    assert bench.cached == ({"stays": 512} if turns else {})


def test_memory_is_given_back_and_accounted_for(model: LoadedModel) -> None:
    """Entries leave for running texts and for newer ones; what running ones reserve is free when they end."""
    each = TargetWorker(FakeLink("t"), model).kv  # type: ignore[arg-type]
    bench = Bench(model, KvMemory(each.of(1000)))
    for n in range(6):
        bench.say(asked(f"r{n}", SYSTEM[40 * n : 40 * n + 300]))
        bench.say(Close(f"r{n}"))
        assert bench.use.bytes == each.of(300) * bench.use.entries <= each.of(1000)
    assert bench.use.entries == 3
    bench.say(asked("long", [7] * 900))
    assert bench.use.entries == 0
    bench.say(Close("long"))
    assert bench.use.entries == 1
    bench.say(KvMemory(each.of(1000), prompt_cache=False))
    assert bench.use.entries == 0 and bench.use.bytes == 0
    bench.say(asked("again", [7] * 900))
    assert not bench.cached


def test_what_failed_is_not_remembered(model: LoadedModel, bonus: Bonus, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, prompt = Bench(model, ROOM), [*SYSTEM[:60], 5]
    with monkeypatch.context() as broken:
        broken.setattr("outrider.engine.verify.BatchForward._scored", lambda *_: mx.full((1,), -1, mx.int32))
        bench.say(asked("bad", prompt))
    assert "NaN or infinite" in bench.told(Fault)["bad"].message
    bench.say(asked("good", prompt))
    assert not bench.cached and bench.told(Outcome)["good"].bonus == bonus(prompt)


def test_a_request_opened_anew_reads_only_what_is_new(model: LoadedModel) -> None:
    bench, tokens = Bench(model, ROOM), [*SYSTEM[:200], 4]
    bench.say(asked("r", tokens))
    anew = Open("r", 1, 3, np.array([*tokens, 8, 9], np.int32), SamplingParams(max_tokens=8))
    bench.say(anew)
    assert bench.cached == {"r": 201}


def test_many_requests_of_which_some_are_cancelled_give_all_back(model: LoadedModel) -> None:
    """The short form of `tests.harness.soak`: every place, and every byte that is not an entry's."""
    draws, each = random.Random(1), TargetWorker(FakeLink("t"), model).kv  # type: ignore[arg-type]
    bench, running = Bench(model, KvMemory(each.of(1000))), deque[str]()
    for number in range(40):
        tokens = SYSTEM[draws.choice((0, number)) :][: draws.randint(1, 120)]
        running.append(f"r{number}")
        bench.say(asked(running[-1], tokens), turns=draws.randint(0, 3))
        if len(running) > draws.randint(0, 4):
            bench.say(Close(running.popleft()), turns=1)
    bench.say(*(Close(name) for name in running))
    assert not bench.told(Fault) and 0 < bench.use.bytes <= each.of(1000)
    bench.say(asked("long", [7] * 990))
    assert bench.use.bytes == 0, "nobody but this one has reserved anything"
    bench.say(Close("long"), KvMemory(0))
    assert not any(bench.worker._kv_cache.state()), "every row was given back"
