"""A worker process: its flags and keys, its link to the orchestrator, and its loop.

A process is identified by its incarnation; the orchestrator assigns its name. Knows nothing of models.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import zmq

from outrider.protocol import clock, endpoints, messages
from outrider.protocol.clock import IDLE_REQUEST_TIMEOUT_NS
from outrider.protocol.codec import decode, decode_all, encode, encode_all
from outrider.protocol.endpoints import Tcp, connect, find_client_keys, parse_endpoint, probe
from outrider.protocol.errors import (
    CannotDraft,
    EndpointError,
    KeyFault,
    OutriderError,
    ProtocolError,
    VersionMismatch,
    WorkerError,
)
from outrider.protocol.keys import ClientKeys
from outrider.protocol.process import run_outside_finalizers
from outrider.protocol.stats import CacheUse

INCARNATION_BITS = 63
IDLE_POLL_MS = 200
EXIT_GRACE_SECONDS = 5.0
MAX_EXPECTED_MS = 10**9
SEND_TIMEOUT_MS = 2000
# How many times a worker that was started by hand polls for the answer to its HELLO: ten seconds, or ten minutes if it
# was in a cluster before. It repeats HELLO after every `POLLS_PER_HELLO` polls: it may be lost, or the server be new.
MAX_WELCOME_POLLS, MAX_REJOIN_POLLS, POLLS_PER_HELLO = 50, 3000, 10
# It considers the orchestrator lost after this many waits without a ping, or this many ping intervals if longer.
MAX_SILENT_WAITS, MAX_OVERDUE_PINGS = 50, 40

log = logging.getLogger(__name__)

CPU_KERNELS_VARIABLE = "OUTRIDER_CPU_KERNELS"
"""The environment variable that passes the setting `cpu_kernels` to a worker: what computes its forwards on a CPU."""

WORKER_MODULES_VARIABLE = "OUTRIDER_WORKER_MODULES"
"""The environment variable that replaces a worker's implementation: a JSON object from its role (target, draft,
prefill) to a list of a module and its first arguments; the worker's usual arguments follow them."""

DRAFTER_CORE_VARIABLE = "OUTRIDER_DRAFTER_CORE"
"""The environment variable with the number of the drafters' core, for a target that may use it while they are idle."""

ANY_CORE = "any"
"""Its value if processes are not pinned to cores, but the target's threads leave one to the drafters."""

Request = TypeVar("Request")


def routing_id(incarnation: int) -> bytes:
    """Returns the routing id of an incarnation's main socket."""
    return f"{incarnation:x}".encode()


def heartbeat_id(main_id: bytes) -> bytes:
    """Returns the routing id of the heartbeat socket for a main socket's id."""
    return main_id + b"/heartbeat"


class OrchestratorGone(Exception):
    """The orchestrator no longer answers; only a worker that was started by hand survives that."""


class WorkerLink(AbstractContextManager["WorkerLink"]):
    """A worker's connection to the orchestrator: the main socket, the heartbeat thread, and the parent's pipe. A
    context manager, for the one busy thread, which does the work and owns the main socket. The heartbeat thread answers
    Ping with a counter that the busy thread moves, so an answer shows progress.

    `incarnation` and `parent_fd` are given to a worker that the orchestrator spawned. One that was started by hand, or
    by a fleet, draws its incarnation; a fleet gives it a parent. `keys`: for endpoints that require keys.
    """

    def __init__(
        self,
        endpoint: str,
        name: str,
        parent_fd: int | None = None,
        incarnation: int | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self.name = name
        self._keys = keys
        self.incarnation = secrets.randbits(INCARNATION_BITS) if incarnation is None else incarnation
        self._progress = self._expected_ms = 0
        self._arrived: deque[messages.Message] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._connect(endpoint, routing_id(self.incarnation))
        self._socket.setsockopt(zmq.RCVTIMEO, IDLE_POLL_MS)
        self._endpoint = endpoint
        self._by_hand = parent_fd is None or incarnation is None
        if self._by_hand:
            self._socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)  # if it is refused, sending would block forever
        self._has_joined = False
        self._pings = self._pings_known = self._waits = 0
        self._max_waits = MAX_SILENT_WAITS
        _end_on_signals(self._by_hand)
        if parent_fd is not None:
            end_with_parent(parent_fd)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is SystemExit and self._by_hand and self._has_joined:
            self.send(messages.Fault(None, "it was stopped"))
        self._socket.close(linger=500)

    def enter(self, hello: messages.Hello) -> None:
        """Sends HELLO and waits for WELCOME; from then on pings are answered, and `name` is the assigned name.

        Called again after the orchestrator was lost: a new one may answer, or the old one, if it was only paused.

        Raises:
            WorkerError: the cluster rejected this worker; the message has its reason.
            EndpointError: nothing answers a worker that was started by hand.
            KeyFault: its key is no longer admitted.
        """
        self._arrived.clear()
        polls, max_polls = 0, MAX_REJOIN_POLLS if self._has_joined else MAX_WELCOME_POLLS
        while not (self._by_hand and polls >= max_polls):
            if polls == 0 or (self._by_hand and polls % POLLS_PER_HELLO == 0):
                if self._keys is not None and self._has_joined:
                    with suppress(EndpointError):  # a server may still start; the key may be no longer admitted
                        probe(self._endpoint, self._keys)
                self.send(hello)
            polls += 1
            if not self._arrived:
                self._fetch(wait=True, entering=True)
            match self._arrived.popleft() if self._arrived else None:
                case messages.Welcome(name=name, ping_ms=ping_ms):
                    self.name, self._waits = name, 0
                    self._max_waits = max(MAX_SILENT_WAITS, MAX_OVERDUE_PINGS * ping_ms // IDLE_POLL_MS)
                    log.info("%s has joined the server at %s", name, self._endpoint)
                    if not self._has_joined:
                        self._has_joined = True
                        threading.Thread(target=self._answer_pings, daemon=True, name="heartbeat").start()
                    return
                case messages.Shutdown(reason=""):
                    sys.exit(0)
                case messages.Shutdown(reason=reason):
                    raise WorkerError(f"the cluster rejected this worker: {reason}")
        raise EndpointError(f"no answer from {self._endpoint}; expected the workers' endpoint of a running cluster")

    def failed(self, error: OutriderError) -> int:
        """Reports to the orchestrator and the log why this worker ends; returns the exit code."""
        log.error("%s", error)
        self.send(messages.Fault(None, str(error), dispensable=isinstance(error, CannotDraft)))
        return error.exit_code

    def expect(self, milliseconds: float) -> None:
        """Sets the longest time that the next piece of work should take; 0: not known."""
        self._expected_ms = min(math.ceil(milliseconds), MAX_EXPECTED_MS)

    def report(self, stage: str) -> None:
        """Sends the stage of the worker's start."""
        self.send(messages.Loading(stage))

    def send(self, *together: messages.Message) -> None:
        """Sends messages together, in this order."""
        self._progress += 1
        frames = encode_all(together)
        try:
            if len(frames) == 1:  # the hot path: one call into C, and no loop in Python, whose code is not in the cache
                self._socket.send(frames[0])
            else:
                self._socket.send_multipart(frames)
        except zmq.Again:
            log.warning("%s was dropped: the orchestrator does not receive", type(together[-1]).__name__)
        # ZeroMQ's thread, which sends the message, may wait for this core; the next forward would keep it waiting.
        os.sched_yield()

    def receive(self, wait: bool) -> messages.Message | None:
        """Returns the next message; None if `wait` is False and there is none. Invalid frames are logged and dropped.

        Raises:
            OrchestratorGone: the cluster dismissed this worker, which was started by hand, or sent no ping for too long
                while it waited.
        """
        while not self._arrived:
            if self._fetch(wait):
                continue
            if not wait:
                return None
            if self._by_hand:
                self._count_wait()
        message = self._arrived.popleft()
        if isinstance(message, messages.Shutdown) and message.reason:
            if self._by_hand:
                raise OrchestratorGone(f"the cluster dismissed this worker: {message.reason}")
            log.error("the cluster dismissed this worker: %s", message.reason)
        return message

    def poll(self, milliseconds: float) -> None:
        """Waits until a message has arrived, at most `milliseconds`."""
        self._socket.poll(max(int(milliseconds), 1))

    def _count_wait(self) -> None:
        """Counts waits instead of measuring time: a process that is suspended does not wait."""
        if self._pings != self._pings_known:
            self._pings_known, self._waits = self._pings, 0
        self._waits += 1
        if self._waits >= self._max_waits:
            raise OrchestratorGone(f"the cluster at {self._endpoint} no longer answers")

    def _fetch(self, wait: bool, entering: bool = False) -> bool:
        """Receives messages that were sent together; invalid frames are logged and dropped. Returns whether any came.

        A wait ends after `IDLE_POLL_MS`, so that the progress counter moves. A WELCOME to a worker that is not
        `entering` answers a repeated HELLO, and is dropped.

        Raises:
            WorkerError: the cluster that this worker is `entering` has another protocol version.
        """
        self._progress += 1
        try:
            received = decode_all(self._socket.recv_multipart(0 if wait else zmq.NOBLOCK))
            self._arrived += (one for one in received if entering or not isinstance(one, messages.Welcome))
        except zmq.Again:
            return False
        except ProtocolError as error:
            if entering and isinstance(error, VersionMismatch):
                raise WorkerError(f"refused by the cluster at {self._endpoint}: {error}") from None
            log.warning("dropped a frame: %s", error)
        return True

    def _connect(self, endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 500)
        if isinstance(parse_endpoint(endpoint), Tcp):
            endpoints.set_remote_options(socket)
        connect(socket, endpoint, self._keys)
        return socket

    def _answer_pings(self) -> None:
        socket = self._connect(self._endpoint, heartbeat_id(routing_id(self.incarnation)))
        while True:
            try:
                message = decode(socket.recv_multipart())
            except ProtocolError as error:
                log.warning("dropped a heartbeat frame: %s", error)
                continue
            except zmq.ZMQError:
                return
            if isinstance(message, messages.Ping):
                self._pings += 1
                pong = messages.Pong(message.serial, self._progress, self._expected_ms, clock.now())
                socket.send_multipart(encode(pong))


def _end_on_signals(by_hand: bool) -> None:
    """Makes SIGTERM end the worker; Ctrl-C too, unless it was spawned: then its orchestrator ends it."""

    def end(_signum: int, _frame: FrameType | None) -> None:
        sys.exit(0)

    signal.signal(signal.SIGINT, run_outside_finalizers(end) if by_hand else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, run_outside_finalizers(end))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # `outrider worker` blocked it until here


def end_with_parent(fd: int, grace_seconds: float = EXIT_GRACE_SECONDS) -> None:
    """Ends this process when the parent's end of the pipe closes, for whatever reason: by SIGTERM, then at once."""

    def watch() -> None:
        while os.read(fd, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


class Link(Protocol):
    """The part of `WorkerLink` that every worker needs."""

    def send(self, message: messages.Message) -> None: ...

    def receive(self, wait: bool) -> messages.Message | None: ...

    def expect(self, milliseconds: float) -> None: ...


class WorkerLoop(ABC, Generic[Request]):
    """A worker's loop: its requests by their ids, and the handling that all workers share."""

    def __init__(self, link: Link, cache_use: Callable[[], CacheUse], limit_cache: Callable[[int], None]) -> None:
        """`cache_use` returns the use of its prompt cache, `limit_cache` sets its limit in bytes."""
        self._link, self._cache_use, self._limit_cache = link, cache_use, limit_cache
        self._running: dict[str, Request] = {}
        self._reported_use = CacheUse()
        self._stale = 0

    def run(self) -> None:
        """Runs until SHUTDOWN. Raises OrchestratorGone for a worker that was started by hand."""
        gc.freeze()  # a full collection over the imported libraries takes longer than a forward
        while self.turn():
            pass

    @abstractmethod
    def turn(self) -> bool:
        """Handles messages or runs one forward. Returns False on SHUTDOWN."""

    def forget(self) -> None:
        """Closes all requests, since their orchestrator is lost; their state stays in the prompt cache."""
        for request in list(self._running):
            self._close(request)
        self._reported_use = CacheUse()  # the next orchestrator has no report yet

    @abstractmethod
    def _release(self, running: Request, discard: bool) -> None:
        """Frees a request's memory; its state may serve later requests. `discard`: keep nothing, after a failure."""

    def _handle(self, message: messages.Message) -> None:
        """Handles the messages that every worker gets."""
        match message:
            case messages.Close(request=request):
                self._close(request)
            case messages.KvMemory():
                self._limit_memory(message)
            case _:
                log.warning("this worker can't handle %s", type(message).__name__)

    def _limit_memory(self, message: messages.KvMemory) -> None:
        """Sets the memory for all texts; a prompt cache that is switched off gets none."""
        self._limit_cache(message.limit if message.prompt_cache else 0)
        self._report()

    def _close(self, request: str, discard: bool = False) -> None:
        """Closes a request, if it is open."""
        if (running := self._running.pop(request, None)) is not None:
            self._release(running, discard)
            self._report()

    def _fail(self, about: object, error: OutriderError, number: int | None = None) -> None:
        """Ends the request that `about`, a message or its state, names, in round `number`; the worker continues."""
        request, epoch = getattr(about, "request", None), getattr(about, "epoch", 0)
        log.warning("request %s failed: %s", request, error, extra={"request": request, "round": number})
        self._close(request or "", discard=True)
        self._link.send(messages.Fault(request, str(error), epoch=epoch))

    def _close_silent(self, waits_since_ns: Callable[[Request], float]) -> None:
        """Closes requests that have waited for a message for a long time, because their CLOSE must have been lost."""
        since_ns = clock.now() - IDLE_REQUEST_TIMEOUT_NS
        for request, running in list(self._running.items()):
            if waits_since_ns(running) < since_ns:
                log.warning("closing request %s: no message for a long time", request, extra={"request": request})
                self._close(request)

    def _report(self) -> None:
        """Reports the use of the prompt cache, if it has changed."""
        use = self._cache_use()
        if use != self._reported_use:
            self._reported_use = use
            self._link.send(messages.CacheReport(use))

    def _drop_stale(self, message: messages.Open | messages.Verify | messages.Commit) -> None:
        """Counts and logs a message about an earlier round, which the caller drops."""
        self._stale += 1
        about = {"request": message.request, "round": message.round}
        kind = type(message).__name__
        log.debug("stale %s of round %d (%d so far)", kind, message.round, self._stale, extra=about)


def create_parser(module: str) -> argparse.ArgumentParser:
    """Returns a parser with the flags that all workers have; the worker's `module` adds its own."""
    parser = argparse.ArgumentParser(prog=module)
    for name in ("--endpoint", "--name", "--model", "--log-level", "--log-format"):
        parser.add_argument(name, required=True)
    parser.add_argument("--parent-fd", type=int)
    parser.add_argument("--incarnation", type=int, help="random if not given")
    parser.add_argument("--keys", type=Path, help="the folder of keys")
    parser.add_argument("--server-key", help="the server's public key (default: the trusted one)")
    parser.add_argument("--log-fd", type=int, help="the log file of the server that started it")
    return parser


def run_worker(
    options: argparse.Namespace, load: Callable[[WorkerLink], tuple[messages.Hello, WorkerLoop[Any]]]
) -> int:
    """Loads the worker, and serves one orchestrator after another; errors are reported to it. Returns the exit code."""
    try:
        keys = find_client_keys(options.endpoint, options.server_key, options.keys)
    except KeyFault as fault:
        log.error("%s", fault)
        return fault.exit_code
    with WorkerLink(options.endpoint, options.name, options.parent_fd, options.incarnation, keys) as link:
        try:
            hello, worker = load(link)
            while True:
                try:
                    link.enter(hello)
                    worker.run()
                    return 0
                except OrchestratorGone as gone:
                    log.warning("%s; this %s worker waits for it, or for a new one", gone, hello.role)
                    worker.forget()
        except OutriderError as error:
            return link.failed(error)
