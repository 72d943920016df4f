"""What decides whether working ahead pays: the verify alone, the work ahead alone, and both at once.

Drives the real workers with real messages, without the rounds, so that each can be timed by itself. All times are spans
the workers measured around evaluated work, on this machine's one clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zmq

from orchestrator.hub import Hub
from protocol import clock
from protocol.errors import WorkerError
from protocol.messages import Branches, Close, Commit, Fault, Hello, Loading, Message, Open, Outcome, Pong, Span, Verify
from protocol.sampling import SamplingParams

REQUEST = "overlap"
PATIENCE_MS = 120_000
WARM_UP_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians over rounds, milliseconds. `verify`: the target alone; `ahead`: the drafter alone; `both`: side by side,
    from the first start to the last end; `verify_beside` and `ahead_beside`: each while the other worked."""

    rounds: int
    depth: int
    branches: int
    verify: float
    ahead: float
    both: float
    verify_beside: float
    ahead_beside: float

    @property
    def efficiency(self) -> float:
        """1: the shorter of the two hides fully behind the longer; 0: they take turns."""
        return (self.verify + self.ahead - self.both) / min(self.verify, self.ahead)

    @property
    def speedup(self) -> float:
        return (self.verify + self.ahead) / self.both


@dataclass(frozen=True, slots=True)
class _Round:
    verify: Span
    ahead: Span


class OverlapBench:
    """Times the workers of `hub`, which it starts and owns. Use as a context manager."""

    def __init__(self, hub: Hub, tell: Callable[[str], None]) -> None:
        self._hub = hub
        self._tell = tell
        self._arrived: deque[Message] = deque()
        self._poller = zmq.Poller()
        self._poller.register(hub.socket, zmq.POLLIN)

    def __enter__(self) -> OverlapBench:
        self._hub.start()
        while not self._hub.ready:
            self._wait(lambda message: isinstance(message, Hello))
        return self

    def __exit__(self, *exc: object) -> None:
        self._hub.close()

    def measure(self, prompt: tuple[int, ...], rounds: int, depth: int, branches: int) -> Overlap:
        """`rounds` rounds of each kind over the target's own text, so that every verify accepts its whole chain.

        Raises:
            WorkerError: there is no drafter, a worker was lost, or one did not answer.
        """
        if not self._hub.drafters():
            raise WorkerError("overlap needs a draft worker; choose a draft backend other than ngram and none")
        text = self._text(prompt, (rounds + WARM_UP_ROUNDS) * (depth + 1) + 1)
        runs = (rounds + WARM_UP_ROUNDS, depth, branches)
        alone = [round_.verify for round_ in self._rounds(text, len(prompt), *runs, target=True, drafter=False)]
        ahead = [round_.ahead for round_ in self._rounds(text, len(prompt), *runs, target=False, drafter=True)]
        beside = list(self._rounds(text, len(prompt), *runs, target=True, drafter=True))
        return Overlap(
            rounds,
            depth,
            branches,
            _median(alone),
            _median(ahead),
            _median(_both(beside)),
            _median([r.verify for r in beside]),
            _median([r.ahead for r in beside]),
        )

    def _text(self, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
        """The prompt and what the target says after it, `length` tokens."""
        self._tell(f"overlap: generating {length} tokens to verify")
        self._open(prompt, target=True, drafter=False)
        text = [*prompt, self._outcome().bonus]
        self._hub.send_target(Verify(REQUEST, 0, 1, len(text), (), run_ahead=length - 2))
        while len(text) < len(prompt) + length:
            text.append(self._outcome().bonus)
        self._close()
        return tuple(text)

    def _rounds(
        self, text: tuple[int, ...], start: int, rounds: int, depth: int, branches: int, *, target: bool, drafter: bool
    ) -> Iterator[_Round]:
        """Commits the text K+1 tokens a round; each round's chain is the text itself."""
        self._tell(f"overlap: {'verify' * target}{' and ' * (target and drafter)}{'work ahead' * drafter}")
        self._open(text[:start], target, drafter)
        if target:
            self._outcome()
        at, told = start + 1, start
        for number in range(1, rounds + 1):
            chain = text[at : at + depth]
            if target:
                self._hub.send_target(Verify(REQUEST, 0, number, at, chain))
            if drafter:
                commit = Commit(REQUEST, 0, number, at, text[told:at], chain, depth, branches)
                for name in self._hub.drafters():
                    self._hub.send_drafter(name, commit)
            verify, ahead = self._answers(target, drafter)
            told, at = at, at + depth + 1
            if number > WARM_UP_ROUNDS:
                yield _Round(verify, ahead)
        self._close()

    def _answers(self, target: bool, drafter: bool) -> tuple[Span, Span]:
        """The round's verify span, and the span from the first forward of the work ahead to its last."""
        verify = ahead = Span(0, 0)
        pieces: list[Span] = []
        while target or drafter:
            message = self._wait(lambda message: isinstance(message, Outcome | Branches))
            if isinstance(message, Outcome):
                verify, target = message.work, False
            elif isinstance(message, Branches):
                pieces.append(message.work)
                if message.final:
                    ahead, drafter = Span(pieces[0].started_ns, message.work.ended_ns), False
        return verify, ahead

    def _open(self, tokens: tuple[int, ...], target: bool, drafter: bool) -> None:
        opening = Open(REQUEST, 0, 0, np.asarray(tokens, np.int32), SamplingParams(max_tokens=1 << 20, ignore_eos=True))
        if target:
            self._hub.send_target(opening)
        if drafter:
            for name in self._hub.drafters():
                self._hub.send_drafter(name, opening)

    def _close(self) -> None:
        self._hub.send_target(Close(REQUEST))
        for name in self._hub.drafters():
            self._hub.send_drafter(name, Close(REQUEST))

    def _outcome(self) -> Outcome:
        message = self._wait(lambda message: isinstance(message, Outcome))
        if not isinstance(message, Outcome):
            raise WorkerError("the target did not answer")
        return message

    def _wait(self, wanted: Callable[[Message], bool]) -> Message:
        """The next wanted message; unwanted ones before it are dropped, what concerns the workers is seen to."""
        deadline_ns = clock.now() + PATIENCE_MS * 1_000_000
        while clock.now() < deadline_ns:
            while self._arrived:
                message = self._arrived.popleft()
                if wanted(message):
                    return message
            self._poller.poll(250)
            self._arrived += self._arrivals()
            for loss in self._hub.losses(clock.now()):
                raise WorkerError(loss.why)
        raise WorkerError(f"no answer from the workers within {PATIENCE_MS // 1000} s")

    def _arrivals(self) -> Iterator[Message]:
        now_ns = clock.now()
        for name, message in self._hub.receive():
            match message:
                case Hello():
                    self._hub.hello(name, message, now_ns)
                case Loading():
                    self._hub.loading(message)
                    self._tell(self._hub.stage)
                case Pong():
                    self._hub.pong(name, message, now_ns)
                case Fault(request=None):
                    self._hub.fault(name, message)
                case Fault():
                    raise WorkerError(message.message)
            yield message
        self._hub.ping(now_ns)


def _both(rounds: Sequence[_Round]) -> list[Span]:
    """From the first start to the last end of each round."""
    return [
        Span(min(r.verify.started_ns, r.ahead.started_ns), max(r.verify.ended_ns, r.ahead.ended_ns)) for r in rounds
    ]


def _median(spans: Sequence[Span]) -> float:
    return statistics.median((span.ended_ns - span.started_ns) / 1e6 for span in spans)
