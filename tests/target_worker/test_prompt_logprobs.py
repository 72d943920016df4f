"""The log-probabilities of a prompt's tokens are those of one forward over it, however the prompt was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.engine.kv_cache import FlatKVCache
from outrider.engine.loading import LoadedModel, load
from outrider.protocol.errors import ModelFault
from outrider.protocol.messages import Autonomous, Close, KvMemory, Open, Outcome, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Logprobs
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, run_worker

TOP = 3
SYSTEM = [(31 * i) % 250 + 2 for i in range(300)]
PROMPTS = {"short": SYSTEM[:9], "long": [*SYSTEM, 5, 6, 7], "same": [*SYSTEM, 5, 6, 8], "one": [40]}


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> LoadedModel:
    return load(tiny_model("llama", seed=4))


@pytest.fixture
def worker(model: LoadedModel, counted_clock: None) -> tuple[TargetWorker, FakeLink]:
    link = FakeLink("target-0")
    worker = TargetWorker(link, model)  # type: ignore[arg-type]
    run_worker(worker, link, [KvMemory(1 << 26)])
    return worker, link


def open_request(
    name: str, tokens: Sequence[int], wanted: int | None = TOP, round_: int = 0, generated: int = 0
) -> Open:
    sampling = SamplingParams(temp=0.8, seed=3, repetition_penalty=1.3, prompt_logprobs=wanted)
    return Open(name, 0, round_, np.array(tokens, np.int32), sampling, generated=generated)


def prompt_logprobs_of(answers: Sequence[Any]) -> dict[str, Logprobs | None]:
    return {one.request: one.prompt_logprobs for one in answers if isinstance(one, Outcome)}


def check(model: LoadedModel, tokens: Sequence[int], rows: Logprobs | None) -> None:
    assert rows is not None and rows.ids[:, 0].tolist() == list(tokens[1:])
    if len(tokens) == 1:  # the first token has none
        return
    logits = np.array(model.model(mx.array([tokens]))[0, :-1], np.float64)
    own = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert np.abs(np.take_along_axis(own, rows.ids, 1) - rows.values).max() < 1e-4
    assert np.abs(np.sort(own)[:, ::-1][:, :TOP] - rows.values[:, 1:]).max() < 1e-4


def test_prompt_logprobs_are_those_of_one_forward(model: LoadedModel, worker: tuple[TargetWorker, FakeLink]) -> None:
    """Beside a decoding request, in pieces, and again when the prompt cache has the prompt."""
    run_worker(*worker, [open_request("decodes", [7, 8, 9], None)])
    run_worker(*worker, [Verify("decodes", 0, 1, 4, Autonomous(10_000))], turns=3)
    for turn in "ab":
        answers: dict[str, Logprobs | None] = {}
        messages = [open_request(name + turn, tokens) for name, tokens in PROMPTS.items()]
        answers |= prompt_logprobs_of(run_worker(*worker, messages, turns=60))
        for name, tokens in PROMPTS.items():
            check(model, tokens, answers[name + turn])
        run_worker(*worker, [Close(name + turn) for name in PROMPTS], turns=3)


def test_only_requests_that_ask_get_prompt_logprobs(worker: tuple[TargetWorker, FakeLink]) -> None:
    messages = [open_request("plain", SYSTEM, None), open_request("again", SYSTEM[::-1], TOP, round_=4, generated=9)]
    assert prompt_logprobs_of(run_worker(*worker, messages)) == {"plain": None, "again": None}
    assert not worker[0]._running["again"].slot.prompt_logprobs  # nor are they computed


def test_request_that_begins_again_before_its_first_token_gets_prompt_logprobs(
    model: LoadedModel, worker: tuple[TargetWorker, FakeLink]
) -> None:
    """Its OPEN was lost, or the target was replaced while it read the prompt."""
    answers = prompt_logprobs_of(run_worker(*worker, [open_request("again", SYSTEM, round_=1)]))
    check(model, SYSTEM, answers["again"])


def test_prompt_logprobs_survive_a_failed_forward(
    model: LoadedModel, worker: tuple[TargetWorker, FakeLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, failures = FlatKVCache.forward, [True, False, True, False, False]

    def fails(self: FlatKVCache, feeds: Any) -> mx.array:
        if failures and failures.pop() and len(feeds) > 1:
            raise ModelFault("broken")
        return forward(self, feeds)

    monkeypatch.setattr(FlatKVCache, "forward", fails)
    answers = prompt_logprobs_of(run_worker(*worker, [open_request(name, tokens) for name, tokens in PROMPTS.items()]))
    assert not failures
    for name, tokens in PROMPTS.items():
        check(model, tokens, answers[name])
