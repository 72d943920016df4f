"""A short run of the socket fuzzers, and tests that they detect crashes, wrong tokens and changed workers."""

from __future__ import annotations

import random
from itertools import count

import pytest
from msgspec.structs import replace

from outrider.orchestrator.core.draft_pool import SentTasks
from outrider.protocol.codec import MESSAGES, decode_all
from outrider.protocol.errors import ProtocolError
from outrider.protocol.messages import Message, Outcome
from tests.harness import fuzz_frames
from tests.harness.fuzz import workers_socket
from tests.harness.fuzz.mutation import Mutator
from tests.harness.fuzz.worker import WorkerFuzz

FRAMES = {"workers": 500, "clients": 500, "target": 400, "drafter": 400, "wire": 100}


def fuzz_passes(name: str, seed: int = 1) -> tuple[bool, list[str]]:
    log: list[str] = []
    return fuzz_frames.fuzz(name, FRAMES[name], seed, log.append), log


@pytest.fixture(autouse=True)
def skip_memory_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the memory check, which is meaningless in so short a run."""
    monkeypatch.setattr(fuzz_frames, "own_memory_and_files", lambda: (1, 1))


@pytest.mark.parametrize("name", fuzz_frames.TARGETS)
def test_a_socket_survives_broken_frames(name: str) -> None:
    passed, log = fuzz_passes(name)
    assert passed, log


def test_mutated_frames_cover_all_message_types() -> None:
    """Some mutated frames still decode as messages; most do not."""
    mutator, kinds, refused = Mutator(random.Random(1), list(MESSAGES)), set(), 0
    for _ in range(700):
        try:
            kinds |= {type(message).__name__ for message in decode_all(mutator.frames())}
        except ProtocolError:
            refused += 1
    assert kinds == set(MESSAGES) and 175 < refused < 680


def test_fuzzer_detects_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    correct_target = workers_socket.target_answers
    calls = count()

    def wrong_target(message: Message) -> list[Message]:
        answers = correct_target(message)
        wrong = [replace(one, bonus=one.bonus + 1) for one in answers if isinstance(one, Outcome)]
        return wrong if next(calls) > 5 else answers

    monkeypatch.setattr(workers_socket, "target_answers", wrong_target)
    passed, log = fuzz_passes("workers")
    assert not passed and "has" in log[-1]


def test_fuzzer_detects_a_worker_that_answers_differently_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    original, numbers = WorkerFuzz._run_request, iter(range(100))

    def changed_answers(fuzzed: WorkerFuzz) -> list[object]:
        return [*original(fuzzed), next(numbers)]

    monkeypatch.setattr(WorkerFuzz, "_run_request", changed_answers)
    assert not fuzz_passes("target")[0]


def test_fuzzer_does_not_hide_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: SentTasks, request: object, from_target: bool, *_: object) -> str:
        if not from_target:
            raise ZeroDivisionError
        return ""

    monkeypatch.setattr(SentTasks, "refusal", crash)
    with pytest.raises(ZeroDivisionError):
        fuzz_passes("workers")
