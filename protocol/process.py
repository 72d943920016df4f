"""What every process needs: a log, signal handlers that may raise, memory and its release, and what the CPU can do."""

from __future__ import annotations

import atexit
import ctypes
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType

LOG_FORMATS = ("text", "json")
LOG_FIELDS = ("request", "round", "client_request", "method", "path", "status", "ms", "caller")
"""The fields that `extra` may add to a log line. `request`: this process's id of the request; `client_request`: the
client's id."""

current_request: ContextVar[str | None] = ContextVar("current_request", default=None)
"""The request in progress in this context; log lines without a request of their own get it."""

log = logging.getLogger(__name__)
RETRY_SECONDS = 0.005
CONTROL_GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_FINALIZER = "__del__"
Handler = Callable[[int, FrameType | None], object]


@cache
def cpu_fields() -> dict[str, str]:
    """Returns Linux's description of the first CPU, such as its `model name`; empty on other systems."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def cpu_flags() -> list[str]:
    """Returns the CPU's instruction sets by Linux's names, such as avx2; empty on other systems."""
    return (cpu_fields().get("flags") or cpu_fields().get("Features", "")).split()


def physical_memory(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> int:
    """Returns the memory of this machine in bytes, or what a container, a service or a job allows this process.

    `groups`: the folder of Linux's control groups of both versions; `own`: the file with the names of this process's.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _limit_files("memory.limit_in_bytes", "memory.max", groups, own):
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            limits.append(int(file.read_text()))
    return min(limits)


def cpu_quota(groups: Path = CONTROL_GROUPS, own: Path = OWN_GROUPS) -> float:
    """Returns how many CPUs' time a container, a service or a job allows this process; infinity: no limit. Arguments as
    for `physical_memory`."""
    limits = [math.inf]
    for file in _limit_files("cpu.cfs_quota_us", "cpu.max", groups, own):
        with suppress(OSError, ValueError):  # no such file, or the word "max"
            quota, _, period = file.read_text().partition(" ")
            limits.append(int(quota) / int(period or file.with_name("cpu.cfs_period_us").read_text()))
    return min(limit for limit in limits if limit > 0)  # version 1 has -1 for no limit


def _limit_files(version_1: str, version_2: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yields the files of a limit, by its name in each version, in this process's control groups and their parents."""
    for line in own.read_text().splitlines() if own.exists() else ():
        _, controllers, name = line.split(":", 2)
        file = groups / controllers / name.strip("/") / (version_1 if controllers else version_2)
        yield from (folder / file.name for folder in file.parents)


def configure_logging(level: str, form: str, process: str, shared_fd: int | None = None) -> None:
    """Sets up logging, once. `process`: this process's name; `shared_fd`: the log of the server that started it.

    Logs are lines of text or JSON objects, one per line, by the standard library's logging. A line about a request has
    its id in a field, from `extra` or from the current context. A process that a server started writes to the server's
    log; errors also go to its own stderr, a file whose last lines the server reports if the process is lost.
    """
    own = logging.StreamHandler()
    handlers: list[logging.Handler] = [own]
    if shared_fd is not None:
        own.setLevel(logging.ERROR)
        handlers.append(logging.StreamHandler(os.fdopen(shared_fd, "w", encoding="utf-8", errors="backslashreplace")))
    for handler in handlers:
        handler.setFormatter(TextFormatter(f"%(asctime)s {process} %(levelname)s %(message)s"))
    if form == "json":
        handlers[-1].setFormatter(JsonFormatter(process))
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
    logging.basicConfig(level=level.upper(), handlers=handlers)


class TextFormatter(logging.Formatter):
    """Formats one line, in which what can't be printed is escaped, and the traceback, if there is one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """Formats one object per line: time (UTC), level, logger, message, process and its id, then the line's fields."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "process": self._process,
            "pid": record.process,
            "request": current_request.get(),
            **{name: getattr(record, name) for name in LOG_FIELDS if hasattr(record, name)},
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}, default=str)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Logs the uncaught exception that ends the process, as one line."""
    log.critical("ended by %s: %s", kind.__name__, error, exc_info=(kind, error, trace))


def trim_memory() -> None:
    """Returns glibc's free blocks to the system; does nothing without glibc. Takes a millisecond or two."""
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def run_outside_finalizers(handler: Handler) -> Handler:
    """Returns a handler that calls `handler`; if a finalizer is running, it tries again later, by SIGALRM, unless
    another handler has taken its place or the interpreter is ending by then.

    Python may call a signal handler between any two steps of the main thread, even in a finalizer. An exception raised
    there is printed as "Exception ignored in ... __del__" and lost, and the signal with it.
    """

    def call(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(number) is not call:
            return
        if _in_finalizer(frame):
            signal.signal(signal.SIGALRM, lambda _, later: call(number, later))
            signal.setitimer(signal.ITIMER_REAL, RETRY_SECONDS)
        else:
            handler(number, frame)

    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)  # later, SIGALRM would end the process
    return call


def _in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == _FINALIZER:
            return True
        frame = frame.f_back
    return False
