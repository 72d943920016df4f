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
from outrider.drafters.fan_out import POLICIES
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.replay import ReplayDrafter, Script
from outrider.engine.loading import load
from outrider.protocol.messages import Branches, Close, Commit, Drafted, Message, Open, Prefilled, Resync, Shutdown
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.worker_link import CPU_KERNELS
from tests.system.links import FakeLink, Idle

PIECE, CHUNK = 256, 128  # tokens a forward: of a text that was left behind, of a prompt
WIDE = {"vocab_size": 152_000, "max_position_embeddings": 8192, "hidden_size": 32, "num_hidden_layers": 1}
BOUND = 100 * 2**20
TEXT = [2 + 7 * i % 250 for i in range(6000)]
SAMPLING = SamplingParams(temp=0.8, seed=4)


def begin(end: int, request: str = "r", verifying: tuple[int, ...] | None = ()) -> Open:
    return Open(request, 0, 0, np.array(TEXT[:end], np.int32), SAMPLING, (), 2, 4, verifying)


def commit(start: int, end: int, verifying: tuple[int, ...] | None = (), number: int = 1) -> Commit:
    return Commit("r", 0, number, end, tuple(TEXT[start:end]), verifying, 2, 4)


class Watched:
    """A drafter that keeps its trees and counts their forwards."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.forwards = inner, 0
        self.trees: list[TokenTree] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, *arguments: Any) -> TokenTree:
        tree = self.inner.open(*arguments)
        for name in ("feed", "read"):
            setattr(tree, name, self._counted(getattr(tree, name)))
        self.trees.append(tree)
        return tree

    def _counted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.forwards += 1
            return forward(*arguments, **named)

        return counted


class Stand:
    """A draft worker and its link, turn by turn."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = Watched(drafter)
        self.link = FakeLink("draft-0")
        self.worker = DraftWorker(self.link, self.drafter, POLICIES["best-first"])  # type: ignore[arg-type]

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
        return self.drafter.trees[tree].column_tokens()

    def sent(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.link.sent if isinstance(message, kind)]

    def branches(self, number: int) -> dict[tuple[int, int], tuple[int, ...]]:
        """What was prepared for this round, as deep as it came."""
        return {e.committed: e.chain for m in self.sent(Branches) if m.round == number for e in m.entries}


@pytest.fixture
def stand(tiny_model: Callable[..., Any]) -> Stand:
    return Stand(MlxDrafter(load(tiny_model("llama", max_position_embeddings=8192))))


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
def test_four_thousand_tokens_take_little_memory(
    tiny_model: Callable[..., Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a vocabulary of 152,000, where the logits and the noise of so many tokens would be gigabytes."""
    monkeypatch.setenv(CPU_KERNELS, kernels)
    stand = Stand(MlxDrafter(load(tiny_model("llama", **WIDE))))
    stand.finish(begin(50))
    with more_memory(BOUND):
        stand.finish(commit(50, 4050))
    assert stand.columns() == TEXT[:4050]
    assert stand.sent(Branches)[-1].final


def test_a_close_is_heard_within_one_piece(stand: Stand) -> None:
    stand.finish(begin(50))
    stand.turn(commit(50, 4050))
    for pieces in range(1, 6):
        stand.turn()
        assert len(stand.columns()) == 50 + pieces * PIECE
    forwards, sent = stand.drafter.forwards, len(stand.link.sent)
    stand.turn(Close("r"))
    assert not stand.turn()
    assert (stand.drafter.forwards, len(stand.link.sent)) == (forwards, sent)


def test_a_commit_is_heard_within_one_piece(stand: Stand) -> None:
    """Only the newest is worked for; no token is fed twice."""
    stand.finish(begin(50))
    stand.turn(commit(50, 1050))
    stand.turn()
    stand.turn(commit(1050, 1060, (), 2))
    stand.turn()
    stand.turn(commit(1060, 1063, (TEXT[1063], 9), 3))
    assert len(stand.columns()) == 50 + 2 * PIECE
    before = len(stand.link.sent)
    stand.finish()
    assert stand.columns() == TEXT[:1063]
    told: list[Any] = list(stand.link.sent)[before:]
    assert {(m.round, m.base_len) for m in told} == {(3, 1063)} and told[-1].final


@pytest.mark.parametrize("missed", [1, 16, 17, 257, 300])
def test_after_catching_up_it_says_what_a_fresh_drafter_says(stand: Stand, missed: int) -> None:
    end = 50 + missed
    stand.finish(begin(50), commit(50, end, (7, 9)))
    fresh = Stand(stand.drafter.inner)
    fresh.finish(begin(end, verifying=(7, 9)))
    assert stand.columns() == fresh.columns() == TEXT[:end]
    # What was learnt of the first round may share the branches out differently.
    ours, theirs = stand.branches(1), fresh.branches(0)
    assert len(ours) == 4 and len(ours.keys() & theirs.keys()) > 1
    assert all(theirs.get(outcome, chain) == chain for outcome, chain in ours.items())


@pytest.mark.parametrize("missed", [2, 700])
def test_a_continuation_waits_until_it_has_caught_up(stand: Stand, missed: int) -> None:
    end = 50 + missed
    stand.finish(begin(50), commit(50, end, None))
    fresh = Stand(stand.drafter.inner)
    fresh.finish(begin(end, verifying=None), Commit("r", 0, 1, end, (), None, 2, 4))
    ours, theirs = stand.sent(Drafted), fresh.sent(Drafted)
    assert len(ours) == 1 and ours[0].base_len == end and ours[0].chain == theirs[0].chain != ()


def test_of_commits_that_wait_together_only_the_last_ones_work_is_done(stand: Stand) -> None:
    stand.finish(begin(50))
    before = stand.drafter.forwards
    for number in range(10):
        stand.turn(commit(50 + number, 51 + number, (), number + 1))
    assert stand.drafter.forwards == before
    stand.finish()
    assert stand.columns() == TEXT[:60]
    assert {m.round for m in stand.sent(Branches)} == {0, 10}


def test_another_requests_forwards_come_between_the_pieces(stand: Stand) -> None:
    stand.finish(begin(50), begin(60, "s"))
    stand.turn(commit(50, 4050))
    stand.turn(Commit("s", 0, 1, 61, (3,), (), 2, 4))
    before = len(stand.link.sent)
    for _ in range(4):
        stand.turn()
    assert {getattr(m, "request", None) for m in list(stand.link.sent)[before:]} == {"s"}
    assert len(stand.columns(0)) == 50 + 4 * PIECE


def test_a_drafter_without_a_model_catches_up_too() -> None:
    stand = Stand(ReplayDrafter(Script((tuple(TEXT),), (0.7,), (0.5,), 300)))
    stand.finish(begin(50), commit(50, 2050))
    assert stand.columns() == TEXT[:2050]
    assert stand.sent(Branches)[-1].final


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
def test_a_prompt_that_nobody_wants_is_read_no_further(stand: Stand, between: list[Message], news: Message) -> None:
    between += [Commit("r", 0, 1, 4001, (3,), (), 2, 4), news]
    stand.finish(begin(4000))
    assert [m.done for m in stand.sent(Prefilled)] == [CHUNK] and not stand.drafter.trees
    assert not stand.sent(Branches)


def test_a_newer_open_takes_the_prompts_place(stand: Stand, between: list[Message]) -> None:
    """What was said of the older one is no reason to ask for it again."""
    again = Open("r", 1, 0, np.array(TEXT[:60], np.int32), SAMPLING, (), 2, 4, ())
    between += [Commit("r", 0, 1, 4001, (3,), (), 2, 4), again, Commit("r", 1, 1, 61, (TEXT[60],), (), 2, 4)]
    stand.finish(begin(4000))
    assert [m.done for m in stand.sent(Prefilled)] == [CHUNK] and len(stand.drafter.trees) == 1
    assert stand.columns() == TEXT[:61]
    assert not stand.sent(Resync) and {(m.epoch, m.round) for m in stand.sent(Branches)} == {(1, 1)}


def test_commits_during_a_prompt_are_one_piece_of_work(stand: Stand, between: list[Message]) -> None:
    between += [commit(1000 + i, 1001 + i, (), i + 1) for i in range(8)]
    stand.finish(begin(1000), begin(20, "s"))
    assert stand.columns(0) == TEXT[:1008]
    assert {m.round for m in stand.sent(Branches) if m.request == "r"} == {8}
    assert any(m.request == "s" for m in stand.sent(Branches))


def test_others_trees_grow_while_a_prompt_is_read(stand: Stand, between: list[Message]) -> None:
    """What is said of them is heard between two pieces; what is said behind an OPEN waits for that."""
    stand.finish(begin(60, "s"))
    between += [
        Commit("s", 0, 1, 61, (TEXT[60],), (), 2, 4),
        begin(20, "t"),
        Commit("t", 0, 1, 21, (TEXT[20],), (), 2, 4),
        commit(4000, 4001),
    ]
    stand.turn(begin(4000))
    told = list(stand.link.sent)
    done = [(m.round, m.final) for m in stand.sent(Branches) if m.request == "s"]
    assert done[-1] == (1, True) and {m.request for m in stand.sent(Branches)} == {"s"}
    last = max(i for i, m in enumerate(told) if isinstance(m, Branches))
    assert sum(isinstance(m, Prefilled) for m in told[last:]) > 4000 // CHUNK - 3, "they waited for the prompt"
    stand.finish()
    assert not stand.sent(Resync)
    assert stand.columns() == TEXT[:21] and stand.columns(1) == TEXT[:4001]
