"""A failure inside a drafter for one request ends only its drafting, never another request or the worker."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import load
from outrider.protocol.messages import Branches, CacheReport, Close, Commit, Fault, KvMemory, Open
from outrider.protocol.sampling import SamplingParams
from tests.system.links import FakeLink, run_worker
from tools.simulation.replay import ReplayDrafter, Script

POISON = 77


class Poisoned:
    """A drafter that fails when it opens a text with a certain token or, if `late`, when it drafts for it."""

    def __init__(self, fault: Exception, late: bool) -> None:
        self._inner = ReplayDrafter(Script((tuple(range(60)),), (0.5,), (0.5,), 100))
        self._fault, self._late = fault, late

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, tokens: Any, *rest: Any) -> Any:
        if POISON not in tokens:
            return self._inner.open(tokens, *rest)
        if not self._late:
            raise self._fault
        tree = self._inner.open([token for token in tokens if token != POISON], *rest)
        tree.feed = self._fails
        return tree

    def _fails(self, *arguments: Any) -> None:
        raise self._fault


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("fault", [AttributeError("offset"), TypeError("scale"), ValueError("shapes"), KeyError(3)])
def test_failed_request_does_not_stop_drafting_for_another(
    fault: Exception, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    link = FakeLink("draft-0", deque())
    worker = DraftWorker(link, Poisoned(fault, late), FAN_OUT_POLICIES["best-first"])  # type: ignore[arg-type]
    messages = [
        message
        for name, tokens in (("doomed", [0, 1, 2, POISON]), ("sound", [0, 1, 2]))
        for message in (
            Open(name, 3, 0, np.array(tokens, np.int32), SamplingParams()),
            Commit(name, 3, 0, len(tokens), (), (), 2, 4),
        )
    ]
    found = run_worker(worker, link, messages)
    faults = {answer.request: answer.message for answer in found if isinstance(answer, Fault)}
    assert {answer.epoch for answer in found if isinstance(answer, Fault)} == {3}
    assert list(faults) == ["doomed"] and type(fault).__name__ in faults["doomed"]
    assert {vars(record).get("request") for record in caplog.records} == {None, "doomed"}
    assert any(isinstance(answer, Branches) and answer.request == "sound" and answer.final for answer in found)


def test_new_orchestrator_gets_a_report_of_the_prompt_cache(tiny_model) -> None:
    """Even if nothing has changed since the report to the last orchestrator."""
    link = FakeLink("draft-0")
    worker = DraftWorker(link, MlxDrafter(load(tiny_model("llama"))), FAN_OUT_POLICIES["best-first"])
    opened = Open("r", 0, 0, np.arange(2, 102, dtype=np.int32), SamplingParams())
    run_worker(worker, link, [KvMemory(2**30), opened])
    run_worker(worker, link, [Close("r")])
    worker.forget()
    assert any(isinstance(sent, CacheReport) and sent.use.bytes for sent in run_worker(worker, link, [KvMemory(2**30)]))


def test_drafting_ends_where_the_draft_models_context_does(tiny_model) -> None:
    """The target's may be longer; the drafter must not feed tokens at positions that its model does not have."""
    link = FakeLink("draft-0")
    model = replace(load(tiny_model("llama")), context_length=48)
    worker = DraftWorker(link, MlxDrafter(model), FAN_OUT_POLICIES["best-first"])
    run_worker(worker, link, [Open("r", 0, 0, np.arange(2, 42, dtype=np.int32), SamplingParams())])
    assert not any(isinstance(a, Fault) for a in run_worker(worker, link, [Commit("r", 0, 1, 43, (5, 6, 7), (), 2, 4)]))
    found = run_worker(worker, link, [Commit("r", 0, 2, 48, (5, 6, 7, 8, 9), (), 2, 4)])
    (fault,) = [answer for answer in found if isinstance(answer, Fault)]
    assert fault.request == "r" and "context is 48" in fault.message
    assert not run_worker(worker, link, [Commit("r", 0, 3, 50, (5, 6), (), 2, 4)]) or not worker._running
