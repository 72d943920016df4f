"""Prompts go to the least busy prefill worker, and back to the target when it can't read them to the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.orchestrator.core.remote_prefills import RemotePrefills
from outrider.protocol.messages import Close, Fault, Message, Prefill, Prefilled, PromptKv

EPOCH = 3


def request(name: str, length: int = 101) -> Any:
    return SimpleNamespace(
        id=name,
        sequence=SimpleNamespace(tokens=list(range(length))),
        round=SimpleNamespace(epoch=EPOCH),
        metrics=SimpleNamespace(remote_prefill_tokens=0),
    )


class PrefillHarness:
    """The prefills of a pool with two prefill workers. Records the messages that are sent."""

    def __init__(self) -> None:
        self.names = {"prefill-0", "prefill-1"}
        self.to_workers: list[tuple[str, Message]] = []
        self.to_target: list[Message] = []
        self.handed_back: list[str] = []
        pool: Any = SimpleNamespace(
            prefill_workers=lambda: self.names,
            send_worker=lambda name, message: self.to_workers.append((name, message)),
            send_target=self.to_target.append,
        )
        self.prefills = RemotePrefills(pool, lambda request: self.handed_back.append(request.id), 50)

    def begin(self, name: str, done: int = 0) -> Any:
        started = request(name)
        assert self.prefills.offer(started)
        self.progress(started, done)
        return started

    def progress(self, started: Any, done: int) -> None:
        self.prefills.on_progress(started, Prefilled(started.id, EPOCH, done, 101))

    def sent(self) -> list[tuple[str, str, str]]:
        return [(name, type(message).__name__, message.request) for name, message in self.to_workers]  # type: ignore[attr-defined]


@pytest.fixture
def harness() -> PrefillHarness:
    return PrefillHarness()


def piece(name: str, epoch: int = EPOCH) -> PromptKv:
    return PromptKv(name, epoch, 0, 40, b"")


def test_each_prompt_is_sent_once_to_the_least_busy_worker(harness: PrefillHarness) -> None:
    first = harness.begin("a", done=40)
    harness.progress(first, 45)
    harness.begin("b")
    harness.begin("c", done=20)
    assert harness.sent() == [
        ("prefill-0", "Prefill", "a"),
        ("prefill-1", "Prefill", "b"),
        ("prefill-0", "Prefill", "c"),
    ]
    message = harness.to_workers[0][1]
    assert isinstance(message, Prefill) and message.start == 40 and message.tokens.tolist() == list(range(101))


@pytest.mark.parametrize("length", [50, 51])
def test_short_prompt_is_not_offered(harness: PrefillHarness, length: int) -> None:
    assert harness.prefills.offer(request("a", length)) is (length > 50)
    harness.names.clear()
    assert not harness.prefills.offer(request("b"))
    harness.progress(request("b"), 0)
    assert not harness.handed_back and not harness.to_workers


def test_short_rest_or_rest_without_a_worker_goes_back_to_the_target(harness: PrefillHarness) -> None:
    harness.begin("a", done=51)
    offered = request("b")
    assert harness.prefills.offer(offered)
    harness.names.clear()
    harness.progress(offered, 0)
    assert harness.handed_back == ["a", "b"] and not harness.to_workers


def test_prompt_that_the_target_has_read_is_sent_to_no_worker(harness: PrefillHarness) -> None:
    harness.begin("a", done=100)
    assert not harness.handed_back and not harness.to_workers


def test_only_pieces_of_the_chosen_worker_and_this_epoch_reach_the_target(harness: PrefillHarness) -> None:
    started = harness.begin("a")
    assert harness.prefills.on_message(started, "prefill-0", piece("a"))
    assert not harness.prefills.on_message(started, "prefill-0", piece("a", EPOCH - 1))
    assert not harness.prefills.on_message(started, "prefill-1", piece("a"))
    assert not harness.prefills.on_message(None, "prefill-0", piece("a"))
    assert harness.to_target == [piece("a")] and started.metrics.remote_prefill_tokens == 40


def test_prompt_of_a_failed_or_lost_worker_goes_back_to_the_target(harness: PrefillHarness) -> None:
    first, second = harness.begin("a"), harness.begin("b")
    assert not harness.prefills.on_message(first, "prefill-0", Fault("a", "it is too long", epoch=EPOCH - 1))
    assert harness.prefills.on_message(first, "prefill-0", Fault("a", "it is too long", epoch=EPOCH))
    other = harness.begin("c")
    harness.prefills.on_worker_lost("prefill-1", {"a": first, "b": second, "c": other})
    assert harness.handed_back == ["a", "b"]
    assert not harness.prefills.on_message(second, "prefill-1", piece("b"))


def test_worker_of_a_prompt_that_is_read_or_offered_again_is_sent_close(harness: PrefillHarness) -> None:
    first, second = harness.begin("a"), harness.begin("b")
    harness.prefills.forget(first)
    assert harness.prefills.offer(second)
    assert harness.to_workers[2:] == [("prefill-0", Close("a")), ("prefill-1", Close("b"))]
    harness.begin("c")
    assert harness.sent()[4:] == [("prefill-0", "Prefill", "c")]
