"""Runs one server in the foreground: core and front threads, signals, drain and shutdown.

Owns the run directory and the order of start and end. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

import zmq
from msgspec import structs

from outrider.orchestrator.auth import create_curve_auth
from outrider.orchestrator.core.loop import Core
from outrider.orchestrator.events import (
    Announcement,
    Failure,
    ModelVocabulary,
    Quit,
    ServerReady,
    ThreadQueues,
)
from outrider.orchestrator.front.admission import Admission
from outrider.orchestrator.front.loop import Front
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine import lan, system
from outrider.orchestrator.machine.http_process import HttpListener, HttpProcess
from outrider.orchestrator.pairing.pairing import ChosenPair, choose_pair, load_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.orchestrator.sockets import ClientSocket
from outrider.protocol.endpoints import Ipc, parse_endpoint
from outrider.protocol.errors import EndpointError, OutriderError, WorkerError, make_error
from outrider.protocol.keys import CLIENT
from outrider.protocol.process import trim_memory
from outrider.protocol.socket_files import PrivateDirectory

STATUS_INTERVAL_SECONDS = 1.0
DRAIN_POLL_SECONDS = 0.05
JOIN_TIMEOUT_SECONDS = 15.0
# The interpreter's switch interval: the core must not wait 5 ms (the default) while the front makes text.
SWITCH_INTERVAL_SECONDS = 0.0002

log = logging.getLogger(__name__)

Event = Announcement | signal.Signals
"""What the main thread waits for: an announcement, or a signal to end the server."""


@dataclass(frozen=True, slots=True)
class ServerThreads:
    """The front thread of a running server, and its HTTP process, if it has one. `ready` is the announcement for the
    moment when the front is ready, which adds notes."""

    front: Front
    http: HttpProcess | None
    ready: ServerReady


def run(
    settings: ServeSettings,
    on_announcement: Callable[[Announcement], None],
    status: Callable[[Front], None] | None = None,
    http: HttpSettings | None = None,
    drain_timeout: int = 0,
) -> None:
    """Serves until a signal ends it. Calls `on_announcement` with the stages of the start, and `status` once a second.

    `http`: also serves HTTP, by a process of its own. `drain_timeout`: seconds that SIGTERM waits for running and
    queued requests; new ones are refused meanwhile, and another signal ends the wait.

    Raises:
        OutriderError: the cluster can't start, can't continue, or could not finish something, such as a trace on a full
            disk; everything that it started is ended.
    """
    files = system.raise_file_limit()
    pair = choose_pair(settings)
    system.assign_core(0, "orchestrator", pair.settings)
    events: SimpleQueue[Event] = SimpleQueue()
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    _report_crashes(events)
    with ExitStack() as stack:
        stack.enter_context(_end_on_signals(events))
        listener = stack.enter_context(closing(HttpListener(http))) if http is not None else None
        directory = stack.enter_context(PrivateDirectory())
        server = stack.enter_context(_run_threads(pair, directory, events, files * 3 // 4, listener))
        if _announce_until_signal(events, server, on_announcement, status) == signal.SIGTERM:
            _drain(events, server, drain_timeout)
    while not events.empty():
        event = events.get()
        if isinstance(event, Failure) and event.kind != WorkerError.__name__:  # clients have been told already
            raise make_error(event.kind, event.message)


def _announce_until_signal(
    events: SimpleQueue[Event],
    server: ServerThreads,
    on_announcement: Callable[[Announcement], None],
    status: Callable[[Front], None] | None,
) -> signal.Signals:
    """Announces events until a signal to end the server arrives, and returns the signal."""
    while True:
        try:
            event = events.get(timeout=STATUS_INTERVAL_SECONDS)
        except Empty:
            _check_sockets(server.ready)
            if server.http is not None:
                server.http.check()
            if status is not None:
                status(server.front)
            continue
        match event:
            case signal.Signals():
                return event
            case Failure():
                raise make_error(event.kind, event.message)
            case ServerReady(notes=notes):
                trim_memory()  # 40 MiB that were needed only to read the tokenizer's file
                on_announcement(structs.replace(server.ready, notes=(*notes, *system.blas_notes())))
            case _:
                on_announcement(event)


def _check_sockets(ready: ServerReady) -> None:
    """Raises EndpointError if the file of a socket was removed, since nothing can connect without it."""
    for where in map(parse_endpoint, filter(None, (ready.own, ready.endpoint, ready.workers, ready.joining))):
        if isinstance(where, Ipc) and not os.path.lexists(where.path):
            raise EndpointError(
                f"the socket {where.path} was removed, and the server can't be reached without it; start the server"
                " again, and exclude that folder from clean-ups (TMPDIR or --endpoint set another one)"
            )


def _drain(events: SimpleQueue[Event], server: ServerThreads, seconds: int) -> None:
    """Waits until all requests have ended, the time is up, or another signal arrives."""
    if server.http is not None:
        server.http.drain()
    server.front.drain()
    deadline = time.monotonic() + seconds
    while server.front.busy and (left := deadline - time.monotonic()) > 0:
        with suppress(Empty):
            event = events.get(timeout=min(left, DRAIN_POLL_SECONDS))
            if isinstance(event, signal.Signals):
                return
            if isinstance(event, Failure):
                raise make_error(event.kind, event.message)


@contextmanager
def _run_threads(
    pair: ChosenPair,
    directory: PrivateDirectory,
    events: SimpleQueue[Event],
    connections: int,
    listener: HttpListener | None,
) -> Iterator[ServerThreads]:
    """Runs both threads and their sockets; the workers load while this thread loads the tokenizers."""
    settings = pair.settings
    context: zmq.Context[Any] = zmq.Context()
    with ExitStack() as stack:
        auth = create_curve_auth(settings, context)
        key = auth.own.public if auth is not None else ""
        if auth is not None:
            stack.callback(auth.close)
        keyed = settings.endpoint if settings.requires_keys(settings.endpoint) else None
        private = directory.endpoint("clients")  # this server's own processes have no keys
        share = connections // 2 if keyed else connections
        clients = ClientSocket(context, private if keyed else settings.endpoint or private, share, auth)
        stack.callback(clients.close)
        if keyed is not None and auth is not None:
            clients.open(keyed, share, auth.own, CLIENT)
        http = None
        if listener is not None:
            http = HttpProcess(listener, clients.own_endpoint, pair.target, directory.path, settings)
            stack.callback(http.close)
        queues = ThreadQueues()
        core = Core(settings, context, queues.core, queues.events, directory.path, auth)
        threads = [_start_thread(core.run, "core")]
        try:
            if settings.advertise:
                stack.enter_context(closing(lan.announce(core.pool.joining_endpoint, key)))
            admission = Admission(pair, load_pair(pair))
            queues.core.put(ModelVocabulary(pair.target.name, admission.tokenizer_fingerprint))
            front = Front(pair, admission, clients, queues, core.stats, events.put)
            threads.insert(0, _start_thread(front.run, "front"))
            ready = ServerReady(
                clients.endpoint,
                core.pool.endpoint,
                http=listener.url if listener is not None else "",
                joining=core.pool.joining_endpoint,
                key=key,
                own=clients.own_endpoint,
            )
            yield ServerThreads(front, http, ready)
        finally:
            queues.events.put(Quit())
            threads[0].join(JOIN_TIMEOUT_SECONDS if len(threads) == 2 else 0)
            queues.core.put(Quit())
            threads[-1].join(JOIN_TIMEOUT_SECONDS)
    if not any(thread.is_alive() for thread in threads):
        queues.close()
        context.term()


def _start_thread(body: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=body, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise WorkerError(f"the server can't start a thread ({error}): {system.likely_cause(1, str(error))}") from None
    return thread


@contextmanager
def _end_on_signals(events: SimpleQueue[Event]) -> Iterator[None]:
    def end(number: int, _frame: FrameType | None) -> None:
        # A SimpleQueue may be put to from a signal handler.
        events.put(signal.Signals(number))

    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = (signal.SIGINT, signal.SIGTERM) if nohup else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _report_crashes(events: SimpleQueue[Event]) -> None:
    """Shuts the server down when a thread ends with an exception."""

    def notice(crash: threading.ExceptHookArgs) -> None:
        error = crash.exc_value
        name = crash.thread.name if crash.thread is not None else "a"
        if isinstance(error, OutriderError):
            events.put(Failure(type(error).__name__, str(error)))
            return
        log.error("the %s thread failed", name, exc_info=error)
        events.put(Failure("OutriderError", f"the {name} thread failed ({error!r}); see the log above"))

    threading.excepthook = notice
