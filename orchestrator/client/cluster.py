"""A local cluster: starts `python -m outrider serve` as a process, waits until it is ready, and ends it.

The server ends when this process ends, for whatever reason. Knows nothing of workers.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Unpack, cast

from outrider.orchestrator.client.client import Client
from outrider.orchestrator.events import Failure, ServerReady, Stage, read_announcement
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import ServeSettings, Settings, describe_settings, to_flags
from outrider.protocol import values
from outrider.protocol.errors import ServerStopped, WorkerError, make_error

if TYPE_CHECKING:
    from outrider.orchestrator.client.async_client import AsyncClient

SHUTDOWN_SECONDS = 24.0


class LocalCluster(AbstractContextManager["LocalCluster"]):
    """Orchestrator, target worker and draft workers on this machine, from creation to `close`; a context manager.

    `progress` is called with each stage of the start. All settings are keywords, named like the flags of `outrider
    serve`:

    {settings}

    Raises:
        OutriderError: the cluster can't start; the class and message say why.
    """

    def __init__(self, *, progress: Callable[[str], None] | None = None, **settings: Unpack[Settings]) -> None:
        if not settings.keys() <= Settings.__annotations__.keys():
            raise values.unknown_keyword_error("LocalCluster", settings, (*Settings.__annotations__, "progress"))
        checked = ServeSettings(**cast("dict[str, Any]", settings))
        self._models = " and ".join(filter(None, (checked.model, checked.draft_model))) or "the default model"
        self._owner = os.getpid()
        self._shutdown_lock = threading.RLock()
        self._process = subprocess.Popen(
            python("-m", "outrider", "serve", "--no-http", "--for-parent", *to_flags(checked)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=child_environment(),
            start_new_session=True,  # Ctrl-C goes to this process only, which shuts the server down
        )
        weakref.finalize(self, self._process.terminate).atexit = False  # for a cluster that is dropped without `close`
        try:
            ready = self._wait_until_ready(progress)
        except BaseException:
            self._shut_down()
            raise
        self.endpoint = ready.endpoint
        self.workers_endpoint = ready.workers
        self.joining_endpoint = ready.joining
        self.own_endpoint = ready.own
        self.notes = ready.notes

    def __repr__(self) -> str:
        code = self._process.poll()
        state = f"at {self.own_endpoint}, pid {self.pid}" if code is None else "ended"
        return f"<LocalCluster of {self._models}, {state}>"

    @property
    def pid(self) -> int:
        """The orchestrator's process id."""
        return self._process.pid

    def client(self, timeout: float = math.inf) -> Client:
        """Returns a client that notices within a second when the server has ended.

        `timeout`: seconds that the server may be silent; inf: as long as its process lives, on however busy a machine.
        """
        return Client(self.own_endpoint, timeout, self._raise_if_ended)

    def async_client(self, timeout: float = math.inf) -> AsyncClient:
        """Returns the same client for asyncio."""
        from outrider.orchestrator.client.async_client import AsyncClient  # deferred: imports asyncio

        return AsyncClient(self.own_endpoint, timeout, self._raise_if_ended)

    def wait(self) -> int:
        """Waits until the server has ended; returns its exit code, negative for the signal that ended it."""
        return self._process.wait()

    def close(self) -> None:
        """Ends the server and its workers, cleanly if possible. Thread-safe; a second call does nothing.

        Raises:
            OutriderError: something could not be finished, such as a trace on a full disk; the server has ended.
        """
        if (unfinished := self._shut_down()) is not None:
            raise make_error(unfinished.kind, unfinished.message)

    def _shut_down(self) -> Failure | None:
        """Ends the server; returns what it could not finish. Does nothing in a process forked from the owner."""
        if os.getpid() != self._owner:
            return None
        with self._shutdown_lock:
            if self._process.stdout is None or self._process.stdout.closed:
                return None
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)  # a process forked from this one may hold its stdin open
            try:
                announced, _ = self._process.communicate(timeout=SHUTDOWN_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
                return None
        last = [one for one in map(read_announcement, announced.splitlines()) if isinstance(one, Failure)]
        return next((one for one in last if one.kind != WorkerError.__name__), None)  # requests have got that error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._shut_down()  # raises nothing: the original error is the one to report

    def _wait_until_ready(self, progress: Callable[[str], None] | None) -> ServerReady:
        for line in self._process.stdout or ():
            match read_announcement(line):
                case ServerReady() as ready:
                    return ready
                case Failure(kind=kind, message=message):
                    raise make_error(kind, message)
                case Stage(text=text) if progress is not None:
                    progress(text)
        code = self._process.wait()
        raise WorkerError(f"the server exited with code {code} before it was ready; see its stderr")

    def _raise_if_ended(self) -> None:
        code = self._process.poll() if os.getpid() == self._owner else None  # only the owner may wait for it
        if code is not None:
            how = f"died (signal {-code})" if code < 0 else f"ended with code {code}"
            raise ServerStopped(f"the server {how}; start it again")


LocalCluster.__doc__ = (LocalCluster.__doc__ or "").replace("{settings}", describe_settings())
