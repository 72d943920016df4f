"""Runs a server in the foreground; Ctrl-C or SIGTERM ends it and every process that it started."""

from __future__ import annotations

import argparse
import logging
import os
import time
from functools import partial

from outrider.orchestrator import serve
from outrider.orchestrator.cli import flags
from outrider.orchestrator.cli.terminal import Screen, say
from outrider.orchestrator.events import Announcement, Failure, ServerReady, Stage, announce
from outrider.orchestrator.front.loop import Front
from outrider.orchestrator.http_settings import MAX_WAIT_SECONDS, HttpSettings
from outrider.orchestrator.settings import ENDPOINTS, ServeSettings
from outrider.protocol import values
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import Stats
from outrider.protocol.worker_link import end_with_parent

DRAIN_SECONDS = 30
SHUTDOWN_SECONDS = 60  # for a server whose parent has ended

log = logging.getLogger(__name__)

COMMON = (
    "--model", "--draft-model", "--mode", "--host", "--port", "--api-key", "--endpoint", "--workers-endpoint",
    "--max-active", "--kv-memory", "--log-level",
)  # fmt: skip
STDIN, STDOUT, STDERR = range(3)


def add_flags(parser: argparse.ArgumentParser) -> None:
    flags.add_http_flags(parser)
    add = flags.add_settings(parser, ENDPOINTS)
    drain = f"time for running requests to finish after SIGTERM; new ones are refused (default: {DRAIN_SECONDS})"
    add("--drain-timeout", type=int, default=DRAIN_SECONDS, metavar="SECONDS", help=drain)
    add("--for-parent", action="store_true", help=argparse.SUPPRESS)
    flags.add_request_flags(parser, ("drafter",))
    flags.add_cluster_flags(parser)


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options, "orchestrator")
    in_json = options.log_format == "json"  # then all that goes to stderr is logged
    board = StatusBoard(in_json)
    try:
        settings, http = ServeSettings(**flags.settings_of(options)), flags.http_settings_of(options)
        drain = values.check_int("drain_timeout", options.drain_timeout, 0, MAX_WAIT_SECONDS)
        if options.for_parent:
            return _run_for_parent(settings, http)
        serve.run(settings, board.announce, status=board.status, http=http, drain_timeout=drain)
    except OutriderError as error:
        if not in_json:
            raise
        log.error("%s", error)
        return error.exit_code
    finally:
        board.clear()
    return 0


def _run_for_parent(settings: ServeSettings, http: HttpSettings | None) -> int:
    """Runs the server for the process that started it: announces on stdout, prints nothing, and ends with stdin."""
    line = os.fdopen(os.dup(STDOUT), "wb", buffering=0)
    os.dup2(STDERR, STDOUT)  # for what a library prints
    end_with_parent(STDIN, SHUTDOWN_SECONDS)
    try:
        serve.run(settings, partial(announce, line), http=http)
    except OutriderError as error:
        announce(line, Failure(type(error).__name__, str(error)))
        return error.exit_code
    return 0


def _print_endpoints(ready: ServerReady) -> None:
    """Prints the server's endpoints and its key to stdout."""
    lines = [("clients", ready.endpoint), ("workers", ready.workers), ("workers", ready.joining)]
    lines += [("key", ready.key), ("HTTP", ready.http)]
    print("\n".join(f"{name}: {value}" for name, value in lines if value), flush=True)


class StatusBoard:
    """Shows a server in a terminal, or logs: the stages of its start, its endpoints; and a live status line."""

    def __init__(self, in_json: bool) -> None:
        self._in_json = in_json
        self._screen = Screen(live=not in_json)
        self._ready = False
        self._tokens = 0
        self._at = time.monotonic()

    def announce(self, announcement: Announcement) -> None:
        match announcement:
            case Stage(text=text):
                self._screen.show(text)
            case ServerReady(notes=notes):
                self._ready = True
                self._screen.clear()
                _print_endpoints(announcement)
                for note in notes:
                    log.warning("%s", note) if self._in_json else say(f"Note: {note}")

    def status(self, front: Front) -> None:
        """Updates the status line, in a terminal only."""
        stats = front.stats("")
        now, tokens = time.monotonic(), stats.generated
        rate = (tokens - self._tokens) / (now - self._at)
        self._at, self._tokens = now, tokens
        if self._ready and self._screen.live:
            self._screen.show(status_line(stats, rate))

    def clear(self) -> None:
        self._screen.clear()


def status_line(stats: Stats, rate: float) -> str:
    """Formats a server's rate, requests and workers for 80 columns; workers that are not ready are named."""
    absent = [f"{worker.name} {worker.state}" for worker in stats.workers if worker.state != "ready"]
    parts = [
        f"{rate:.0f} tok/s",
        f"{stats.active} running, {stats.queued} waiting, {stats.finished} done, {stats.failed} failed",
        *(absent or [f"{len(stats.workers)} workers"]),
    ]
    return " | ".join(parts)
