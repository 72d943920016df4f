"""A failure inside a model for one request ends only that request, never another one or the worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import qwen3_next
from msgspec.structs import replace as replace_struct

from outrider.engine.loading import LoadedModel, load
from outrider.engine.verify import BatchForward, PrefillChunk, begin_forward
from outrider.protocol.messages import Abilities, Autonomous, DraftTokens, Fault, Open, Outcome, Verify
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker import model_runner
from outrider.target_worker.worker import TargetWorker
from tests.system.links import FakeLink, run_worker
from tests.system.markov import Markov, markov

TABLE = np.random.default_rng(6).normal(size=(6, 6)).astype(np.float32)
POISON = 5
TABLE[:, POISON] = -99.0  # the model never chooses it
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temp=1.0, seed=4)
RESIDUAL = SamplingParams(temp=1.0, seed=4, rule="residual")


class Poisoned(Markov):
    """A model that fails when it reads a certain token: it raises `fault`, or its logits are NaN."""

    def __init__(self, fault: Exception | None) -> None:
        super().__init__(TABLE)
        self._fault = fault

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        poisoned = bool((tokens == POISON).any().item())
        if poisoned and self._fault is not None:
            raise self._fault
        logits = super().__call__(tokens, cache)
        return logits * mx.nan if poisoned else logits


def poisoned(fault: Exception | None) -> LoadedModel:
    return replace(markov(TABLE), model=Poisoned(fault))


@pytest.fixture(autouse=True)
def skip_load_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.engine.load_checks.probe_abilities", lambda model: Abilities())


def open_request(request: str, tokens: list[int], sampling: SamplingParams = GREEDY) -> Open:
    return Open(request, 0, 0, np.array(tokens, np.int32), sampling)


def faults(answers: list[Any]) -> dict[str | None, str]:
    return {answer.request: answer.message for answer in answers if isinstance(answer, Fault)}


RAISED = [AttributeError("offset"), TypeError("scale"), ValueError("shapes"), KeyError("x"), RuntimeError("matmul")]
FAULTS = [*RAISED, None]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, RESIDUAL], ids=["greedy", "sampled", "residual"])
def test_draft_that_the_model_fails_on_costs_only_its_round(fault: Exception | None, sampling: SamplingParams) -> None:
    """Plain decoding never reads such a token, and a drafter must not be able to end a text."""
    link = FakeLink("target-0", deque())
    worker = TargetWorker(link, poisoned(fault))  # type: ignore[arg-type]
    first = run_worker(
        worker, link, [open_request("plain", [1, 2], sampling), open_request("drafted", [1, 2], sampling)]
    )
    assert not faults(first) and len(first) == 2
    proposal = DraftTokens((POISON, 1))
    for messages in ([Verify("drafted", 0, 1, 3, proposal)], [Verify("plain", 0, 1, 3)]):  # alone, then together
        first += run_worker(worker, link, messages)
    first += run_worker(worker, link, [Verify("drafted", 0, 2, 4, proposal), Verify("plain", 0, 2, 4)])
    assert not faults(first) and all(answer.accepted == 0 for answer in first if isinstance(answer, Outcome))
    bonuses = [[answer.bonus for answer in first if answer.request == name] for name in ("plain", "drafted")]
    assert bonuses[0] == bonuses[1] and len(bonuses[0]) == 3


def test_failed_verify_leaves_the_recurrent_state_of_others(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent model is fed one text after another, so some have been fed when one fails."""
    model, plain = load(tiny_model("qwen3_next")), qwen3_next.Model.__call__

    def call(self: Any, tokens: mx.array, *rest: Any, **others: Any) -> mx.array:
        if (tokens == POISON).any().item():
            raise ValueError("shapes")
        return plain(self, tokens, *rest, **others)

    monkeypatch.setattr(qwen3_next.Model, "__call__", call)
    poisoned, texts = Verify("poisoned", 0, 1, 3, DraftTokens((POISON, 1))), list[list[int]]()
    for more in ([], [poisoned]):
        link = FakeLink("target-0", deque())
        worker = TargetWorker(link, model)  # type: ignore[arg-type]
        run_worker(worker, link, [open_request("sound", [40, 41, 42]), open_request("poisoned", [50, 51])])
        found = run_worker(worker, link, [Verify("sound", 0, 1, 4), *more])
        found += run_worker(worker, link, [Verify("sound", 0, 2, 5, Autonomous(8))])
        assert not faults(found)
        texts.append([answer.bonus for answer in found if isinstance(answer, Outcome) and answer.request == "sound"])
    assert texts[0] == texts[1] and len(texts[0]) == 9


def test_fault_is_sent_only_after_all_ranks_have_answered() -> None:
    """The forward may have failed because a rank died; then this process ends while it waits for the answers."""

    class LostRanks:
        def check_ranks(self) -> None:
            raise SystemExit(5)

    link, leader = FakeLink("target-0", deque()), LostRanks()
    worker = TargetWorker(link, poisoned(ValueError("shapes")), leader=leader)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        run_worker(worker, link, [open_request("doomed", [1, POISON])])
    assert not faults(list(link.sent))


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_failed_prompt_ends_only_its_own_request(fault: Exception | None) -> None:
    link = FakeLink("target-0", deque())
    worker = TargetWorker(link, poisoned(fault))  # type: ignore[arg-type]
    doomed = replace_struct(open_request("doomed", [1, POISON]), epoch=3)
    found = run_worker(worker, link, [doomed, open_request("sound", [1, 2])])
    assert list(faults(found)) == ["doomed"]
    assert [answer.epoch for answer in found if isinstance(answer, Fault)] == [3]
    assert [answer.request for answer in found if isinstance(answer, Outcome)] == ["sound"]


def poisoned_after_five(fault: Exception | None) -> LoadedModel:
    """A model whose text is 1, 2, 3, 4, poison."""
    table = np.full((6, 6), -9.0, np.float32)
    table[np.arange(6), (np.arange(6) + 1) % 6] = 9.0
    model = poisoned(fault)
    model.model._table = mx.array(table)
    return model


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_step_begun_before_the_text_ended_may_fail(fault: Exception | None) -> None:
    link = FakeLink("target-0", deque())
    worker = TargetWorker(link, poisoned_after_five(fault))  # type: ignore[arg-type]
    run_worker(worker, link, [replace_struct(open_request("ended", [0, 1]), eos=(POISON,))])
    found = run_worker(worker, link, [Verify("ended", 0, 1, 3, Autonomous(10))])
    assert [getattr(answer, "bonus", answer) for answer in found] == [3, 4, POISON]
    assert worker._running["ended"].slot.fed == 5


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_failed_plain_round_ends_only_its_own_request(
    fault: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    link = FakeLink("target-0", deque())
    worker = TargetWorker(link, poisoned_after_five(fault))  # type: ignore[arg-type]
    run_worker(worker, link, [open_request("doomed", [0, 1]), open_request("sound", [0])])
    found = run_worker(worker, link, [Verify("doomed", 0, 1, 3, Autonomous(10))])
    assert [answer.bonus for answer in found if isinstance(answer, Outcome)] == [3, 4, 5]
    assert list(faults(found)) == ["doomed"]
    assert ("doomed", 4) in {(vars(record).get("request"), vars(record).get("round")) for record in caplog.records}
    assert "NaN or infinite" in found[-1].message if fault is None else type(fault).__name__ in found[-1].message
    assert len(run_worker(worker, link, [Verify("sound", 0, 1, 2, Autonomous(2))])) == 2


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_piece_of_a_prompt_whose_forward_fails_at_its_end_does_not_count_as_read(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU reports a failure only when a forward is read; the keys and values that it wrote are then undefined."""
    link = FakeLink("target-0", deque())
    worker = TargetWorker(link, markov(TABLE))  # type: ignore[arg-type]
    if beside:
        run_worker(worker, link, [open_request("decoding", [1])])
    begun, fails = list[int](), iter([True])

    def begin(inputs: Any, chunks: Sequence[PrefillChunk] = (), after: Any = None) -> BatchForward:
        begun.extend(chunk.slot.fed for chunk in chunks)
        return begin_forward(inputs, chunks, after)

    def commit(forward: BatchForward) -> Any:
        if begun and next(fails, False):
            raise RuntimeError("Command buffer execution failed")
        return read(forward)

    read = BatchForward.commit
    monkeypatch.setattr(model_runner, "begin_forward", begin)
    monkeypatch.setattr(BatchForward, "commit", commit)
    found = run_worker(
        worker, link, [open_request("reading", [1, 2, 3]), *([Verify("decoding", 0, 1, 2)] if beside else [])]
    )
    if beside:
        assert not faults(found) and {answer.request for answer in found} == {"decoding", "reading"}
        assert begun == [0, 0]
    else:
        assert "Command buffer" in faults(found)["reading"]
