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


class Bench:
    """Remote prefills of a pool with two workers, and what they sent."""

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
        begun = request(name)
        assert self.prefills.offer(begun)
        self.progress(begun, done)
        return begun

    def progress(self, begun: Any, done: int) -> None:
        self.prefills.on_progress(begun, Prefilled(begun.id, EPOCH, done, 101))

    def sent(self) -> list[tuple[str, str, str]]:
        return [(name, type(message).__name__, message.request) for name, message in self.to_workers]  # type: ignore[attr-defined]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def piece(name: str, epoch: int = EPOCH) -> PromptKv:
    return PromptKv(name, epoch, 0, 40, b"")


def test_each_prompt_is_sent_once_to_the_least_busy_worker(bench: Bench) -> None:
    first = bench.begin("a", done=40)
    bench.progress(first, 45)
    bench.begin("b")
    bench.begin("c", done=20)
    assert bench.sent() == [("prefill-0", "Prefill", "a"), ("prefill-1", "Prefill", "b"), ("prefill-0", "Prefill", "c")]
    message = bench.to_workers[0][1]
    assert isinstance(message, Prefill) and message.start == 40 and message.tokens.tolist() == list(range(101))


@pytest.mark.parametrize("length", [50, 51])
def test_short_prompt_is_not_offered(bench: Bench, length: int) -> None:
    assert bench.prefills.offer(request("a", length)) is (length > 50)
    bench.names.clear()
    assert not bench.prefills.offer(request("b"))
    bench.progress(request("b"), 0)
    assert not bench.handed_back and not bench.to_workers


def test_rest_that_is_short_or_that_nobody_can_read_goes_back_to_the_target(bench: Bench) -> None:
    bench.begin("a", done=51)
    offered = request("b")
    assert bench.prefills.offer(offered)
    bench.names.clear()
    bench.progress(offered, 0)
    assert bench.handed_back == ["a", "b"] and not bench.to_workers


def test_prompt_that_the_target_has_needs_no_reader(bench: Bench) -> None:
    bench.begin("a", done=100)
    assert not bench.handed_back and not bench.to_workers


def test_only_the_readers_pieces_of_this_epoch_reach_the_target(bench: Bench) -> None:
    begun = bench.begin("a")
    assert bench.prefills.on_message(begun, "prefill-0", piece("a"))
    assert not bench.prefills.on_message(begun, "prefill-0", piece("a", EPOCH - 1))
    assert not bench.prefills.on_message(begun, "prefill-1", piece("a"))
    assert not bench.prefills.on_message(None, "prefill-0", piece("a"))
    assert bench.to_target == [piece("a")] and begun.metrics.remote_prefill_tokens == 40


def test_prompt_of_a_failed_or_lost_worker_goes_back_to_the_target(bench: Bench) -> None:
    first, second = bench.begin("a"), bench.begin("b")
    assert bench.prefills.on_message(first, "prefill-0", Fault("a", "it is too long"))
    other = bench.begin("c")
    bench.prefills.on_worker_lost("prefill-1", {"a": first, "b": second, "c": other})
    assert bench.handed_back == ["a", "b"]
    assert not bench.prefills.on_message(second, "prefill-1", piece("b"))


def test_reader_of_a_prompt_that_is_read_or_offered_again_is_told_to_end(bench: Bench) -> None:
    first, second = bench.begin("a"), bench.begin("b")
    bench.prefills.forget(first)
    assert bench.prefills.offer(second)
    assert bench.to_workers[2:] == [("prefill-0", Close("a")), ("prefill-1", Close("b"))]
    bench.begin("c")
    assert bench.sent()[4:] == [("prefill-0", "Prefill", "c")]
