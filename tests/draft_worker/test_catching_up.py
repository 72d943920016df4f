"""A drafter that is behind, or reads a long prompt, reads in pieces and handles messages between them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.drafter import Drafter, TokenTree
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.loading import load
from outrider.protocol.messages import (
    Branches,
    Close,
    Commit,
    Drafted,
    Fault,
    Message,
    Open,
    Prefilled,
    Resync,
    Shutdown,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.worker_link import CPU_KERNELS_VARIABLE, OrchestratorGone
from tests.columns import column_tokens
from tests.system.links import FakeLink, Idle
from tools.simulation.replay import ReplayDrafter, Script

PIECE, CHUNK = 256, 128  # tokens a forward: of a text that was left behind, of a prompt
WIDE = {"vocab_size": 152_000, "max_position_embeddings": 8192, "hidden_size": 32, "num_hidden_layers": 1}
BOUND = 100 * 2**20
TEXT = [2 + 7 * i % 250 for i in range(6000)]
SAMPLING = SamplingParams(temp=0.8, seed=4)


def begin(end: int, request: str = "r", verifying: tuple[int, ...] | None = ()) -> Open:
    return Open(request, 0, 0, np.array(TEXT[:end], np.int32), SAMPLING, (), 2, 4, verifying)


def commit(start: int, end: int, verifying: tuple[int, ...] | None = (), number: int = 1) -> Commit:
    return Commit("r", 0, number, end, tuple(TEXT[start:end]), verifying, 2, 4)


class CountingDrafter:
    """A drafter that keeps its trees and counts their forwards."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.forwards = inner, 0
        self.trees: list[TokenTree] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, *arguments: Any) -> TokenTree:
        tree = self.inner.open(*arguments)
        for name in ("feed", "begin", "read"):  # `begin`: trees of a model that are fed together
            if hasattr(tree, name):
                setattr(tree, name, self._counted(getattr(tree, name)))
        self.trees.append(tree)
        return tree

    def _counted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.forwards += 1
            return forward(*arguments, **named)

        return counted


class WorkerUnderTest:
    """A draft worker and its link, turn by turn."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = CountingDrafter(drafter)
        self.link = FakeLink("draft-0")
        self.worker = DraftWorker(self.link, self.drafter, FAN_OUT_POLICIES["best-first"])  # type: ignore[arg-type]

    def turn(self, *messages: Message) -> bool:
        """False once the worker would wait."""
        self.link.inbox += messages
        try:
            return self.worker.turn()
        except Idle:
            return False

    def finish(self, *messages: Message) -> None:
        self.link.inbox += messages
        while self.turn():
            pass

    def columns(self, tree: int = -1) -> list[int]:
        return column_tokens(self.drafter.trees[tree])

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.link.sent if isinstance(message, kind)]

    def branches(self, number: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """What was prepared for this round, as deep as it came."""
        return {e.committed: e.chain for m in self.sent(Branches) if m.round == number for e in m.entries}


@pytest.fixture
def worker_under_test(tiny_model: Callable[..., Any]) -> WorkerUnderTest:
    return WorkerUnderTest(MlxDrafter(load(tiny_model("llama", max_position_embeddings=8192))))


@contextmanager
def more_memory(most: int) -> Iterator[None]:
    """MLX and numpy hold at most so many bytes more at their peaks than before."""
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    tracemalloc.start()
    yield
    peak = mx.get_peak_memory() - before + tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"\n{peak / 2**20:.1f} MiB more")
    assert 0 < peak < most


@pytest.mark.parametrize("kernels", ["auto", "mlx"])
def test_catching_up_2000_tokens_takes_little_memory(
    tiny_model: Callable[..., Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a vocabulary of 152,000, where the logits and the noise of so many tokens would be gigabytes."""
    monkeypatch.setenv(CPU_KERNELS_VARIABLE, kernels)
    worker_under_test = WorkerUnderTest(MlxDrafter(load(tiny_model("llama", **WIDE))))
    worker_under_test.finish(begin(50))
    with more_memory(BOUND):
        worker_under_test.finish(commit(50, 2050))
    assert worker_under_test.columns() == TEXT[:2050]
    assert worker_under_test.sent(Branches)[-1].final


def test_close_is_handled_within_one_piece(worker_under_test: WorkerUnderTest) -> None:
    worker_under_test.finish(begin(50))
    worker_under_test.turn(commit(50, 4050))
    for pieces in range(1, 6):
        worker_under_test.turn()
        assert len(worker_under_test.columns()) == 50 + pieces * PIECE
    forwards, sent = worker_under_test.drafter.forwards, len(worker_under_test.link.sent)
    worker_under_test.turn(Close("r"))
    assert not worker_under_test.turn()
    assert (worker_under_test.drafter.forwards, len(worker_under_test.link.sent)) == (forwards, sent)


def test_commit_is_handled_within_one_piece(worker_under_test: WorkerUnderTest) -> None:
    """Only the newest is worked for; no token is fed twice."""
    worker_under_test.finish(begin(50))
    worker_under_test.turn(commit(50, 1050))
    worker_under_test.turn()
    worker_under_test.turn(commit(1050, 1060, (), 2))
    worker_under_test.turn()
    worker_under_test.turn(commit(1060, 1063, (TEXT[1063], 9), 3))
    assert len(worker_under_test.columns()) == 50 + 2 * PIECE
    before = len(worker_under_test.link.sent)
    worker_under_test.finish()
    assert worker_under_test.columns() == TEXT[:1063]
    told: list[Any] = list(worker_under_test.link.sent)[before:]
    assert {(m.round, m.base_len) for m in told} == {(3, 1063)} and told[-1].final


@pytest.mark.parametrize("missed", [1, 16, 17, 257, 300])
def test_branches_after_catching_up_equal_those_of_a_fresh_drafter(
    worker_under_test: WorkerUnderTest, missed: int
) -> None:
    end = 50 + missed
    worker_under_test.finish(begin(50), commit(50, end, (7, 9)))
    fresh = WorkerUnderTest(worker_under_test.drafter.inner)
    fresh.finish(begin(end, verifying=(7, 9)))
    assert worker_under_test.columns() == fresh.columns() == TEXT[:end]
    # What was learnt of the first round may share the branches out differently.
    ours, theirs = worker_under_test.branches(1), fresh.branches(0)
    assert len(ours) == 4 and len(ours.keys() & theirs.keys()) > 1
    assert all(theirs.get(outcome, chain) == chain for outcome, chain in ours.items())


@pytest.mark.parametrize("missed", [2, 700])
def test_continuation_waits_until_the_drafter_has_caught_up(worker_under_test: WorkerUnderTest, missed: int) -> None:
    end = 50 + missed
    worker_under_test.finish(begin(50), commit(50, end, None))
    fresh = WorkerUnderTest(worker_under_test.drafter.inner)
    fresh.finish(begin(end, verifying=None), Commit("r", 0, 1, end, (), None, 2, 4))
    ours, theirs = worker_under_test.sent(Drafted), fresh.sent(Drafted)
    assert len(ours) == 1 and ours[0].base_len == end and ours[0].chain == theirs[0].chain != ()


def test_only_the_last_of_several_waiting_commits_is_worked_on(worker_under_test: WorkerUnderTest) -> None:
    worker_under_test.finish(begin(50))
    before = worker_under_test.drafter.forwards
    for number in range(10):
        worker_under_test.turn(commit(50 + number, 51 + number, (), number + 1))
    assert worker_under_test.drafter.forwards == before
    worker_under_test.finish()
    assert worker_under_test.columns() == TEXT[:60]
    assert {m.round for m in worker_under_test.sent(Branches)} == {0, 10}


def test_forwards_of_other_requests_come_between_the_pieces(worker_under_test: WorkerUnderTest) -> None:
    worker_under_test.finish(begin(50), begin(60, "s"))
    worker_under_test.turn(commit(50, 4050))
    worker_under_test.turn(Commit("s", 0, 1, 61, (3,), (), 2, 4))
    before = len(worker_under_test.link.sent)
    for _ in range(4):
        worker_under_test.turn()
    assert {getattr(m, "request", None) for m in list(worker_under_test.link.sent)[before:]} == {"s"}
    assert len(worker_under_test.columns(0)) == 50 + 4 * PIECE


def test_drafter_without_a_model_catches_up() -> None:
    worker_under_test = WorkerUnderTest(ReplayDrafter(Script((tuple(TEXT),), (0.7,), (0.5,), 300)))
    worker_under_test.finish(begin(50), commit(50, 2050))
    assert worker_under_test.columns() == TEXT[:2050]
    assert worker_under_test.sent(Branches)[-1].final


# --- while a prompt is read -----------------------------------------------------------------------------------------


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Message]]:
    """Messages that arrive after the first chunk of a prompt."""
    later: list[Message] = []
    send = FakeLink.send

    def told(self: FakeLink, message: Message) -> None:
        send(self, message)
        if isinstance(message, Prefilled):
            self.inbox += later
            later.clear()

    monkeypatch.setattr(FakeLink, "send", told)
    yield later
    assert not later


@pytest.mark.parametrize("news", [Close("r"), Shutdown()], ids=["close", "shutdown"])
def test_reading_a_prompt_stops_after_close_or_shutdown(
    worker_under_test: WorkerUnderTest, between: list[Message], news: Message
) -> None:
    between += [Commit("r", 0, 1, 4001, (3,), (), 2, 4), news]
    worker_under_test.finish(begin(4000))
    assert [m.done for m in worker_under_test.sent(Prefilled)] == [CHUNK] and not worker_under_test.drafter.trees
    assert not worker_under_test.sent(Branches)


def test_newer_open_replaces_a_prompt_being_read(worker_under_test: WorkerUnderTest, between: list[Message]) -> None:
    """What was said of the older one is no reason to ask for it again."""
    again = Open("r", 1, 0, np.array(TEXT[:60], np.int32), SAMPLING, (), 2, 4, ())
    between += [Commit("r", 0, 1, 4001, (3,), (), 2, 4), again, Commit("r", 1, 1, 61, (TEXT[60],), (), 2, 4)]
    worker_under_test.finish(begin(4000))
    assert [m.done for m in worker_under_test.sent(Prefilled)] == [CHUNK] and len(worker_under_test.drafter.trees) == 1
    assert worker_under_test.columns() == TEXT[:61]
    assert not worker_under_test.sent(Resync) and {(m.epoch, m.round) for m in worker_under_test.sent(Branches)} == {
        (1, 1)
    }


def test_commits_during_a_prompt_are_handled_together(
    worker_under_test: WorkerUnderTest, between: list[Message]
) -> None:
    between += [commit(1000 + i, 1001 + i, (), i + 1) for i in range(8)]
    worker_under_test.finish(begin(1000), begin(20, "s"))
    assert worker_under_test.columns(0) == TEXT[:1008]
    assert {m.round for m in worker_under_test.sent(Branches) if m.request == "r"} == {8}
    assert any(m.request == "s" for m in worker_under_test.sent(Branches))


def test_trees_of_other_requests_grow_while_a_prompt_is_read(
    worker_under_test: WorkerUnderTest, between: list[Message]
) -> None:
    """What is said of them is heard between two pieces; what is said behind an OPEN waits for that."""
    worker_under_test.finish(begin(60, "s"))
    between += [
        Commit("s", 0, 1, 61, (TEXT[60],), (), 2, 4),
        begin(20, "t"),
        Commit("t", 0, 1, 21, (TEXT[20],), (), 2, 4),
        commit(4000, 4001),
    ]
    worker_under_test.turn(begin(4000))
    told = list(worker_under_test.link.sent)
    done = [(m.round, m.final) for m in worker_under_test.sent(Branches) if m.request == "s"]
    assert done[-1] == (1, True) and {m.request for m in worker_under_test.sent(Branches)} == {"s"}
    last = max(i for i, m in enumerate(told) if isinstance(m, Branches))
    assert sum(isinstance(m, Prefilled) for m in told[last:]) > 4000 // CHUNK - 3, "they waited for the prompt"
    worker_under_test.finish()
    assert not worker_under_test.sent(Resync)
    assert worker_under_test.columns() == TEXT[:21] and worker_under_test.columns(1) == TEXT[:4001]


def test_dismissal_during_a_prompt_ends_the_worker(
    worker_under_test: WorkerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no failure of the prompt's request, after which the worker would go on as if it were still a member."""

    def dismissed(_: FakeLink, wait: bool) -> Message | None:
        raise OrchestratorGone("the cluster dismissed this worker")

    faults = list[Message]()

    def sent(link: FakeLink, message: Message) -> None:
        faults.extend([message] if isinstance(message, Fault) else [])
        monkeypatch.setattr(FakeLink, "receive", dismissed)

    monkeypatch.setattr(FakeLink, "send", sent)
    with pytest.raises(OrchestratorGone):
        worker_under_test.finish(begin(4000))
    assert not faults
