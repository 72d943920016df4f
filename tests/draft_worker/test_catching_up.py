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
from outrider.protocol.clock import IDLE_REQUEST_TIMEOUT_NS
from outrider.protocol.messages import (
    Branches,
    Close,
    Commit,
    Drafted,
    Fault,
    KvMemory,
    Message,
    Open,
    Resync,
    Shutdown,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.worker_link import CPU_KERNELS_VARIABLE
from tests.columns import column_tokens
from tests.system.links import FakeLink, Idle, VirtualClock
from tools.simulation.replay import ReplayDrafter, Script

PIECE = 128  # tokens of a text in a forward
WIDE = {"vocab_size": 152_000, "max_position_embeddings": 8192, "hidden_size": 32, "num_hidden_layers": 1}
BOUND = 100 * 2**20
TEXT = [2 + 7 * i % 250 for i in range(6000)]
SAMPLING = SamplingParams(temp=0.8, seed=4)


def begin(end: int, request: str = "r") -> Open:
    return Open(request, 0, 0, np.array(TEXT[:end], np.int32), SAMPLING)


def commit(start: int, end: int, verifying: tuple[int, ...] | None = (), number: int = 1, request: str = "r") -> Commit:
    return Commit(request, 0, number, end, tuple(TEXT[start:end]), verifying, 2, 4)


class CountingDrafter:
    """A drafter that keeps its trees and counts their forwards."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.forwards = inner, 0
        self.trees: list[TokenTree] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, *arguments: Any) -> TokenTree:
        tree = self.inner.open(*arguments)
        for name in ("feed", "begin"):  # `begin`: trees of a model that are fed together
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
        """The branches of this round, each at its greatest depth."""
        return {e.committed: e.chain for m in self.sent(Branches) if m.round == number for e in m.entries}


@pytest.fixture
def worker_under_test(tiny_model: Callable[..., Any]) -> WorkerUnderTest:
    return WorkerUnderTest(MlxDrafter(load(tiny_model("llama", max_position_embeddings=8192))))


@contextmanager
def peak_memory_below(most: int) -> Iterator[None]:
    """Checks that the block raises the peak memory of MLX and numpy by less than `most` bytes."""
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
    with peak_memory_below(BOUND):
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
    """Only the newest commit gets branches; no token is fed twice."""
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
    answers: list[Any] = list(worker_under_test.link.sent)[before:]
    assert {(m.round, m.base_len) for m in answers} == {(3, 1063)} and answers[-1].final


@pytest.mark.parametrize("missed", [1, 16, 17, 257, 300])
def test_branches_after_catching_up_equal_those_of_a_fresh_drafter(
    worker_under_test: WorkerUnderTest, missed: int
) -> None:
    end = 50 + missed
    worker_under_test.finish(begin(50), commit(50, end, (7, 9)))
    fresh = WorkerUnderTest(worker_under_test.drafter.inner)
    fresh.finish(begin(end), commit(end, end, (7, 9), 0))
    assert worker_under_test.columns() == fresh.columns() == TEXT[:end]
    # What the drafter learned from its first round may change which outcomes get branches.
    ours, theirs = worker_under_test.branches(1), fresh.branches(0)
    assert len(ours) == 4 and len(ours.keys() & theirs.keys()) > 1
    assert all(theirs.get(outcome, chain) == chain for outcome, chain in ours.items())


@pytest.mark.parametrize("missed", [2, 700])
def test_continuation_waits_until_the_drafter_has_caught_up(worker_under_test: WorkerUnderTest, missed: int) -> None:
    end = 50 + missed
    worker_under_test.finish(begin(50), commit(50, end, None))
    fresh = WorkerUnderTest(worker_under_test.drafter.inner)
    fresh.finish(begin(end), commit(end, end, None))
    ours, theirs = worker_under_test.sent(Drafted), fresh.sent(Drafted)
    assert len(ours) == 1 and ours[0].base_len == end and ours[0].chain == theirs[0].chain != ()


def test_only_the_last_of_several_waiting_commits_is_worked_on(worker_under_test: WorkerUnderTest) -> None:
    worker_under_test.finish(begin(50), commit(50, 50, (), 0))
    before = worker_under_test.drafter.forwards
    for number in range(10):
        worker_under_test.turn(commit(50 + number, 51 + number, (), number + 1))
    assert worker_under_test.drafter.forwards == before
    worker_under_test.finish()
    assert worker_under_test.columns() == TEXT[:60]
    assert {m.round for m in worker_under_test.sent(Branches)} == {0, 10}


def test_forwards_of_other_requests_come_before_the_next_piece(worker_under_test: WorkerUnderTest) -> None:
    worker_under_test.finish(begin(50), begin(60, "s"))
    worker_under_test.turn(commit(50, 4050))
    worker_under_test.turn()
    worker_under_test.turn(Commit("s", 0, 1, 61, (3,), (), 2, 4))
    while not [m for m in worker_under_test.sent(Branches) if m.round == 1 and m.final]:
        worker_under_test.turn()
        assert len(worker_under_test.columns(0)) == 50 + PIECE
    worker_under_test.turn()
    assert len(worker_under_test.columns(0)) == 50 + 2 * PIECE


def test_prompt_is_read_on_although_others_always_have_work(worker_under_test: WorkerUnderTest) -> None:
    worker_under_test.finish(begin(60, "s"))
    worker_under_test.turn(begin(4000))
    for number in range(1, 40):
        worker_under_test.turn(Commit("s", 0, number, 60 + number, (TEXT[59 + number],), (), 2, 4))
        worker_under_test.turn()
    assert len(worker_under_test.columns()) >= 4 * PIECE


def test_drafter_without_a_model_catches_up() -> None:
    worker_under_test = WorkerUnderTest(ReplayDrafter(Script((tuple(TEXT),), (0.7,), (0.5,), 300)))
    worker_under_test.finish(begin(50), commit(50, 2050))
    assert worker_under_test.columns() == TEXT[:2050]
    assert worker_under_test.sent(Branches)[-1].final


# --- while a prompt is read -----------------------------------------------------------------------------------------


def begin_reading(worker_under_test: WorkerUnderTest, *news: Message) -> None:
    """Reads a piece of a prompt of 4,000 tokens; then `news` arrive."""
    worker_under_test.turn(begin(4000))
    worker_under_test.turn()
    assert len(worker_under_test.columns()) == PIECE
    worker_under_test.link.inbox += news


@pytest.mark.parametrize("news", [Close("r"), Shutdown()], ids=["close", "shutdown"])
def test_reading_a_prompt_stops_after_close_or_shutdown(worker_under_test: WorkerUnderTest, news: Message) -> None:
    begin_reading(worker_under_test, Commit("r", 0, 1, 4001, (3,), (), 2, 4), news)
    assert worker_under_test.turn()
    assert worker_under_test.turn() == isinstance(news, Close)
    if isinstance(news, Close):
        assert not worker_under_test.turn(), "it does not wait"
    assert len(worker_under_test.columns()) == PIECE and not worker_under_test.sent(Branches)


def test_prompt_closed_while_it_is_read_frees_its_row_and_caches_what_was_read(
    worker_under_test: WorkerUnderTest,
) -> None:
    worker_under_test.finish(KvMemory(1 << 30))
    begin_reading(worker_under_test, Close("r"))
    worker_under_test.finish()
    closed: Any = worker_under_test.drafter.trees[0]
    assert closed.kv_rows.sequence.row < 0, "its row is not free"
    worker_under_test.finish(begin(4000, "s"))
    use = worker_under_test.drafter.inner.prompt_cache.use
    assert (use.hits, use.tokens_saved) == (1, PIECE) and worker_under_test.columns() == TEXT[:4000]


def test_prompts_with_a_common_beginning_are_read_once(worker_under_test: WorkerUnderTest) -> None:
    """Even if all of them are opened before the first one is read."""
    worker_under_test.finish(KvMemory(1 << 30))
    begin_reading(worker_under_test, begin(3000, "s"), begin(3500, "t"))
    worker_under_test.finish()
    use = worker_under_test.drafter.inner.prompt_cache.use
    assert (use.hits, use.tokens_saved) == (2, 2999 + 3499)
    assert [len(worker_under_test.columns(tree)) for tree in range(3)] == [4000, 3000, 3500]


def test_newer_open_replaces_a_prompt_being_read(worker_under_test: WorkerUnderTest) -> None:
    """The COMMIT for the older one must not lead to a RESYNC."""
    again = Open("r", 1, 0, np.array(TEXT[:60], np.int32), SAMPLING)
    old, new = Commit("r", 0, 1, 4001, (3,), (), 2, 4), Commit("r", 1, 1, 61, (TEXT[60],), (), 2, 4)
    begin_reading(worker_under_test, old, again, new)
    worker_under_test.finish()
    assert len(worker_under_test.columns(0)) == PIECE and worker_under_test.columns() == TEXT[:61]
    assert not worker_under_test.sent(Resync)
    assert {(m.epoch, m.round) for m in worker_under_test.sent(Branches)} == {(1, 1)}


def test_commits_during_a_prompt_are_handled_together(worker_under_test: WorkerUnderTest) -> None:
    begin_reading(worker_under_test, *[commit(4000 + i, 4001 + i, (), i + 1) for i in range(8)])
    worker_under_test.link.inbox += [begin(20, "s"), commit(20, 20, request="s")]
    worker_under_test.finish()
    assert worker_under_test.columns(0) == TEXT[:4008]
    assert {m.round for m in worker_under_test.sent(Branches) if m.request == "r"} == {8}
    assert any(m.request == "s" for m in worker_under_test.sent(Branches))


def test_rounds_during_a_prompt_count_with_their_own_times(
    worker_under_test: WorkerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the time between two queued messages, which would seem too short for any branches."""
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)
    begin_reading(worker_under_test)
    for number in range(1, 12):
        clock.skip(50 * 1_000_000)
        worker_under_test.turn(commit(3999 + number, 4000 + number, (7,), number))
    assert worker_under_test.worker._batcher.capacity.rounds(1) > 50


def test_trees_of_other_requests_grow_while_a_prompt_is_read(worker_under_test: WorkerUnderTest) -> None:
    """A prompt that comes later is read after the first one; messages about it are handled as they come."""
    worker_under_test.finish(begin(60, "s"))
    of_s = Commit("s", 0, 1, 61, (TEXT[60],), (), 2, 4)
    of_t = Commit("t", 0, 1, 21, (TEXT[20],), (), 2, 4)
    begin_reading(worker_under_test, of_s, begin(20, "t"), of_t, commit(4000, 4001))
    while not any(m.round == 1 and m.final for m in worker_under_test.sent(Branches)):
        worker_under_test.turn()
    assert {m.request for m in worker_under_test.sent(Branches)} == {"s"}
    assert len(worker_under_test.columns(1)) <= 2 * PIECE, "they waited for the prompt"
    worker_under_test.finish()
    assert not worker_under_test.sent(Resync)
    assert worker_under_test.columns() == TEXT[:21] and worker_under_test.columns(1) == TEXT[:4001]


def test_failure_in_the_middle_of_a_prompt_ends_only_its_request(
    worker_under_test: WorkerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker_under_test.finish(begin(60, "s"))
    begin_reading(worker_under_test, Commit("s", 0, 1, 61, (TEXT[60],), (), 2, 4))
    reading: Any = worker_under_test.drafter.trees[1]

    def fail(*_: Any) -> None:
        raise RuntimeError("[malloc] out of memory")

    monkeypatch.setattr(reading.kv_rows, "prefill", fail)
    worker_under_test.finish()
    (fault,) = worker_under_test.sent(Fault)
    assert fault.request == "r" and "out of memory" in fault.message
    assert any((m.request, m.round, m.final) == ("s", 1, True) for m in worker_under_test.sent(Branches))
    assert reading.kv_rows.sequence.row < 0, "its row is not free"


def test_request_whose_prompt_is_read_for_a_long_time_is_not_closed(
    worker_under_test: WorkerUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No message about it arrives, since the target reads the prompt for as long."""
    clock = VirtualClock()
    monkeypatch.setattr("outrider.protocol.clock.now", clock)
    begin_reading(worker_under_test)
    clock.skip(2 * IDLE_REQUEST_TIMEOUT_NS)
    worker_under_test.finish(begin(20, "s"))
    assert worker_under_test.columns(0) == TEXT[:4000]
