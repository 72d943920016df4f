"""The HTTP server's process and its socket, which is opened before anything is loaded and survives a restart.

The process ends when its stdin closes, and so with this process; the first line on stdin holds its settings. Knows a
command line and a process id; knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from outrider.orchestrator.http_settings import HttpOrder, HttpSettings
from outrider.orchestrator.machine import system
from outrider.orchestrator.machine.spawn import MALLOC_ENV, STDERR, SpawnedProcess, child_environment, python
from outrider.orchestrator.pairing.model_files import ModelFiles
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.endpoints import listen_error
from outrider.protocol.errors import EndpointError, WorkerError

SERVER_MODULE = "outrider.server"
BACKLOG = 1024
DRAIN_COMMAND = b"drain\n"
SHUTDOWN_SECONDS = 5.0
MIN_UPTIME_SECONDS = 10.0
"""A process that ends sooner is not restarted, since it would end again."""

# Without this limit, each thread that has built a large answer keeps its own memory for the next one.
SERVER_MALLOC_ENV = {**MALLOC_ENV, "MALLOC_ARENA_MAX": "2"}
# Pages of 2 MiB: a process that wakes for each chunk finds the CPU's caches full of a model's weights, and pays for
# every page that it touches. Only glibc's allocator, from 2.35 on, can use them; without them, it is the slower one.
LARGE_PAGES_ENV = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

log = logging.getLogger(__name__)


class HttpListener:
    """A TCP socket that listens on the settings' host and port; `url`: its address for clients. `hint`, which settings
    to change, ends the error.

    Raises:
        EndpointError: the host is unknown or the port is taken; the message says what to do.
    """

    def __init__(self, settings: HttpSettings, hint: str = "--host, --port; or --no-http") -> None:
        host, port = settings.host, settings.port
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()  # all interfaces: also of IPv4
            self.socket = socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
        except (OSError, UnicodeError) as error:
            raise EndpointError(f"{listen_error(f'{host}:{port}', error)} ({hint})") from None
        host, port = self.socket.getsockname()[:2]
        self.url = f"{settings.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self.settings = settings

    def close(self) -> None:
        self.socket.close()


class HttpProcess:
    """The process that serves a listener's socket as a client of the orchestrator at `endpoint`, from creation to
    `close`; `check` restarts it if it has ended. `settings`: the orchestrator's, for the log.

    Raises:
        WorkerError: it can't be started.
    """

    def __init__(
        self, listener: HttpListener, endpoint: str, model: ModelFiles, run_dir: Path, settings: ServeSettings
    ) -> None:
        served = model.name, str(model.folder), listener.socket.fileno()
        self._order = HttpOrder(listener.settings, endpoint, *served, settings.log_level, settings.log_format)
        self._log = run_dir / "http.log"
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Restarts the process if it has ended.

        Raises:
            WorkerError: it ended too soon after its start (the message has the last lines of its log), or can't be
                started again.
        """
        code = self._process.poll()
        if code is None:
            return
        ended = f"the HTTP server {system.describe_exit(code, self._process.log_tail())}"
        if time.monotonic() - self._started < MIN_UPTIME_SECONDS:
            raise WorkerError(ended)
        log.error("%s; restarting it", ended)
        self._start()

    def drain(self) -> None:
        """Makes the process report that it is not ready, and refuse new requests."""
        self._process.write(DRAIN_COMMAND)

    def close(self) -> None:
        """Ends the process; running answers have `SHUTDOWN_SECONDS` to finish."""
        self._process.close_stdin()
        self._process.wait(SHUTDOWN_SECONDS)

    def _start(self) -> None:
        self._started = time.monotonic()
        shared = os.dup(STDERR)
        env = {**SERVER_MALLOC_ENV, **large_pages_env(), **child_environment()}
        inherited = self._order.listener, shared
        try:
            self._process = SpawnedProcess("HTTP server", python("-m", SERVER_MODULE), env, self._log, "ab", inherited)
        finally:
            os.close(shared)
        self._process.write(msgspec.json.encode(replace(self._order, log_fd=shared)) + b"\n")


def large_pages_env() -> dict[str, str]:
    """Returns the environment variables for large pages; none if the C library can't use them."""
    name, version = platform.libc_ver()
    return LARGE_PAGES_ENV if name == "glibc" and [int(part) for part in version.split(".")] >= [2, 35] else {}
