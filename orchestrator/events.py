"""What the orchestrator's threads tell each other, and a starting server its parent.

The *core* thread owns the workers' socket and the rounds; it deals in tokens. The *front* thread owns the clients'
socket, tokenizers, text and the queue of waiting requests; it deals in text.

`ThreadQueues`: the queues between the orchestrator's threads, as one record. `Mailbox`: a queue between two threads
that a ZeroMQ poller can wait on. `CoreStats`: what the front may ask of the core at any time.

`Announcement`: what a starting server reports to the process that started it, as a JSON line on a socket. The same
socket ends the server when the parent closes its end, or is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import zmq

from outrider.orchestrator.limits import KVBudget
from outrider.protocol.heads import DRAFT_MODEL, JOINT
from outrider.protocol.messages import RoundRecord, Timings, WorkerStats
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Logprobs, Origin, joined
from outrider.protocol.stats import Durations

# --- front -> core ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Run this request now. `sampling.seed` is drawn already; `mode` is ar, sd, ssd or auto; `eos` is empty when
    ignored.

    `num_draft_tokens` and `branches` None: neither client nor server has named any. `origins`, `rounds`: report them.
    `resume_tokens`: the text's first tokens, which another server has made. `drafter`: the only one to draft, if it is
    named. `code`: its prompt looks like a program.
    """

    request: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    mode: str
    eos: frozenset[int]
    num_draft_tokens: int | None = None
    branches: int | None = None
    origins: bool = False
    rounds: bool = False
    resume_tokens: tuple[int, ...] = ()
    drafter: str = ""
    code: bool = False

    @property
    def takes_workers(self) -> bool:
        """Whether draft workers may draft for it."""
        return self.mode != "ar" and (not self.drafter or DRAFT_MODEL in self.drafter.split(JOINT))


@dataclass(frozen=True, slots=True)
class Stop:
    """End this request now: `reason` is stop (a stop string was found) or cancelled."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class ModelVocabulary:
    """A digest of what the tokens of the cluster's `model` stand for; a drafter's must equal it."""

    model: str
    vocabulary: str


@dataclass(frozen=True, slots=True)
class Quit:
    """End the core thread: close every request, tell the workers to shut down."""


# --- core -> front ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """A worker became ready, was lost, or reported a stage of its start. `kv_budget`: what texts may take in them
    all."""

    workers: tuple[WorkerStats, ...]
    ready: bool
    stage: str = ""
    fatal: str = ""
    notes: tuple[str, ...] = ()
    kv_budget: KVBudget | None = None


@dataclass(frozen=True, slots=True)
class RequestBegan:
    """The request runs in `mode`; `notes` give the reason whenever speculation is off."""

    request: str
    mode: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    request: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Committed:
    """These tokens are final, EOS included if it ended the text.

    `logprobs` and `origins` are theirs, `rounds` those that brought them, if asked for.
    """

    request: str
    tokens: tuple[int, ...]
    logprobs: Logprobs | None = None
    origins: tuple[Origin, ...] | None = None
    rounds: tuple[RoundRecord, ...] | None = None

    def and_then(self, later: Committed) -> Committed:
        """Both in one."""
        logprobs = [one.logprobs for one in (self, later) if one.logprobs is not None]
        origins = None if self.origins is None else self.origins + (later.origins or ())
        rounds = None if self.rounds is None else self.rounds + (later.rounds or ())
        return Committed(
            self.request, self.tokens + later.tokens, joined(logprobs) if logprobs else None, origins, rounds
        )


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """`reason` is eos, stop, length or cancelled. `until(n)`: the timings of the first n tokens, when no more of them
    count."""

    request: str
    reason: str
    timings: Timings
    notes: tuple[str, ...] = ()
    until: Callable[[int], Timings] | None = None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The request ended badly; `kind` names a class of protocol.errors."""

    request: str
    kind: str
    message: str


ToCore = Admit | Stop | ModelVocabulary | Quit
ToFront = WorkersChanged | RequestBegan | PrefillProgress | Committed | RequestEnded | RequestFailed


def together(events: Iterable[ToFront]) -> list[ToFront]:
    """The same events, but consecutive tokens of one request are one event, so a late reader gets them at once."""
    found: list[ToFront] = []
    latest: dict[str, int] = {}
    for event in events:
        match event:
            case Committed():
                at = latest.setdefault(event.request, len(found))
                before = found[at : at + 1]
                if before and isinstance(before[0], Committed):
                    found[at] = before[0].and_then(event)
                    continue
            case RequestBegan() | PrefillProgress() | RequestEnded() | RequestFailed():
                latest.pop(event.request, None)
        found.append(event)
    return found


T = TypeVar("T")
_names = itertools.count()


class Mailbox(Generic[T]):
    """Threads put, one other thread takes. Register `wake` with the taker's poller."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self._putting = threading.Lock()
        address = f"inproc://mailbox-{next(_names)}"
        self.wake: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.wake.bind(address)
        self._bell: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self._bell.connect(address)

    def put(self, item: T) -> None:
        """Never waits. Wakes the taker for the first item; it takes the others along."""
        with self._putting:
            self._items.put(item)
            if self._items.qsize() <= 1:
                with contextlib.suppress(zmq.Again):
                    self._bell.send(b"", zmq.NOBLOCK)

    def take(self) -> Iterator[T]:
        """Everything put so far, without waiting."""
        while self.wake.poll(0):
            self.wake.recv()
        while True:
            try:
                yield self._items.get_nowait()
            except Empty:
                return

    def close(self) -> None:
        self._bell.close(linger=0)
        self.wake.close(linger=0)


@dataclass(frozen=True, slots=True)
class EndServer:
    """Main thread -> front thread: end, after each client was told."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Main thread -> front thread: take no new requests."""


@dataclass(frozen=True, slots=True)
class CoreStats:
    """The core's counts and durations since the start; see `Stats`."""

    stale_messages: int
    rejected_frames: int
    dropped_branches: int
    round_seconds: Durations
    verify_seconds: Durations


@dataclass(frozen=True, slots=True)
class ThreadQueues:
    """The ways between threads: to the core, from the core, and orders from the main thread."""

    core: Mailbox[ToCore]
    events: Mailbox[ToFront]
    orders: Mailbox[Drain | EndServer]

    def close(self) -> None:
        for mailbox in (self.core, self.events, self.orders):
            mailbox.close()


@dataclass(frozen=True, slots=True)
class Stage:
    """How far the start is, for a person to read."""

    text: str


@dataclass(frozen=True, slots=True)
class ServerReady:
    """Clients may connect at `endpoint`, further drafters at `workers`; `notes` are worth a line each. `http` is where
    HTTP is served, if it is.

    `joining`: where drafters of other machines join. `key`: the server's, where keys are asked for. `own`: where its
    owner's processes on this machine connect without any.
    """

    endpoint: str
    workers: str = ""
    notes: tuple[str, ...] = ()
    http: str = ""
    joining: str = ""
    key: str = ""
    own: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """The server can't go on; `kind` names a class of protocol.errors."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The server has ended as it was asked to, but for this; `kind` as above."""

    kind: str
    message: str


Announcement = Stage | ServerReady | Failure | Unfinished
_KINDS: dict[str, type[Announcement]] = {cls.__name__: cls for cls in (Stage, ServerReady, Failure, Unfinished)}


def announce(line: socket.socket, announcement: Announcement) -> None:
    """Tells the parent; a parent that is gone is no error here, its end is noticed by `wait_for_end`."""
    text = json.dumps([type(announcement).__name__, asdict(announcement)])
    try:
        line.sendall(text.encode() + b"\n")
    except OSError:
        return


def wait_for_end(line: socket.socket) -> None:
    """Returns when the parent's end of the line is closed, however the parent went."""
    try:
        while line.recv(1):
            pass
    except OSError:
        return


def announcements(line: socket.socket) -> Iterator[Announcement]:
    """What the server tells, until it goes. TimeoutError when the socket has a timeout and nothing comes."""
    rest = b""
    while data := line.recv(4096):
        *lines, rest = (rest + data).split(b"\n")
        for one in lines:
            kind, fields = json.loads(one, object_hook=_tuples)
            yield _KINDS[kind](**fields)


def _tuples(fields: dict[str, object]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
