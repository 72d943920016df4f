"""A server with a scripted core, to test the front and clients over real sockets without models."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable

import pytest
import zmq
from msgspec import structs

from outrider.orchestrator.client.client import Client
from outrider.orchestrator.events import (
    Admit,
    Announcement,
    Committed,
    Mailbox,
    Quit,
    RequestBegan,
    RequestEnded,
    Stop,
    ThreadQueues,
    ToCore,
    ToFront,
    WorkersChanged,
)
from outrider.orchestrator.front.admission import Admission
from outrider.orchestrator.front.loop import Front
from outrider.orchestrator.pairing.pairing import ChosenPair
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.orchestrator.sockets import ClientSocket
from outrider.protocol.messages import Stats, Timings, WorkerStats
from outrider.protocol.stats import Durations

JOIN_SECONDS = 200.0
OnAdmit = Callable[[Admit], list[ToFront]]


def worker_stats(role: str, state: str = "ready") -> WorkerStats:
    return WorkerStats(role, f"{role}-0", 1, "mlx", "m", 4096, 1024, 1, 1, state=state)


class ScriptedCore:
    """Answers each Admit with the events that `on_admit` returns, and each Stop with RequestEnded."""

    def stats(self, stats: Stats) -> Stats:
        rounds = Durations((3, 1), 2.0)
        rejected = stats.rejected_frames + 2
        return structs.replace(
            stats, stale_messages=3, rejected_frames=rejected, dropped_branches=1, round_seconds=rounds
        )

    def __init__(self, inbox: Mailbox[ToCore], outbox: Mailbox[ToFront]) -> None:
        self.inbox, self.outbox = inbox, outbox
        self.received: list[ToCore] = []
        self.condition = threading.Condition()
        self.on_admit: OnAdmit = lambda admit: []

    def run(self) -> None:
        while True:
            select.select([self.inbox.wake], [], [])
            for event in self.inbox.take():
                with self.condition:
                    self.received.append(event)
                    self.condition.notify_all()
                match event:
                    case Admit():
                        for answer in self.on_admit(event):
                            self.outbox.put(answer)
                    case Stop(request=request, reason=reason):
                        timings = Timings(predicted_n=99, predicted_ms=10.0)
                        self.outbox.put(RequestEnded(request, reason, timings, until=lambda n: Timings(predicted_n=n)))
                    case Quit():
                        return

    def wait_for(self, kind: type[object], count: int = 1) -> list[object]:
        """Returns all received events of a kind as soon as there are `count`. The test fails if they don't arrive."""

        def found() -> list[object]:
            return [event for event in self.received if isinstance(event, kind)]

        with self.condition:
            if not self.condition.wait_for(lambda: len(found()) >= count, JOIN_SECONDS):
                pytest.fail(f"expected {count} {kind.__name__}, the core received {self.received}")
        return found()


class ScriptedServer:
    """A running front, its scripted core, and clients of it."""

    def __init__(self, pair: ChosenPair, codec: TextCodec, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sockets = ClientSocket(self.context, endpoint)
        self.endpoint = self.sockets.endpoint
        self.codec = codec
        self.queues = ThreadQueues()
        self.core = ScriptedCore(self.queues.core, self.queues.events)
        self.announced: list[Announcement] = []
        self.admission = Admission(pair, codec)
        self.front = Front(pair, self.admission, self.sockets, self.queues, self.core.stats, self.announced.append)
        self._threads = [threading.Thread(target=body, daemon=True) for body in (self.core.run, self.front.run)]

    def start(self, ready: bool = True) -> ScriptedServer:
        if ready:
            self.queues.events.put(WorkersChanged((worker_stats("target"), worker_stats("draft"))))
        for thread in self._threads:
            thread.start()
        return self

    def client(self, timeout: float = JOIN_SECONDS) -> Client:
        return Client(self.endpoint, timeout)

    def stop(self) -> None:
        """Ends the front as a real server does. Does nothing when called again."""
        if self.context.closed:
            return
        if self._threads[1].is_alive():
            self.queues.events.put(Quit())
            self._threads[1].join(JOIN_SECONDS)
        self.queues.core.put(Quit())
        self._threads[0].join(JOIN_SECONDS)
        self.queues.close()
        self.context.destroy(linger=0)


def generates(codec: TextCodec, text: str, reason: str = "eos", size: int = 3) -> OnAdmit:
    """Returns an `on_admit` that commits `text`, `size` tokens at a time, and ends the request."""

    def on_admit(admit: Admit) -> list[ToFront]:
        tokens = codec.encode(text, special=False)
        if reason == "eos":
            tokens += (0,)
        groups = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        timings = Timings(prompt_n=len(admit.tokens), predicted_n=len(tokens), predicted_ms=10.0)
        return [
            RequestBegan(admit.request, "ssd"),
            *(Committed(admit.request, group) for group in groups),
            RequestEnded(admit.request, reason, timings, until=lambda n: structs.replace(timings, predicted_n=n)),
        ]

    return on_admit
