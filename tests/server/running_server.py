"""A running HTTP server for a cluster, for tests: its URL, and a Python client."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from outrider import Client
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine.http_process import HttpListener, HttpProcess
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.settings import ServeSettings
from tests.tiny import Pair

KEY = "a-key-of-the-tests"
START_SECONDS = 200.0
TRIES = 20
STREAMS = 4
"""The limit of concurrent answers to each caller of the chat model's server."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """`url` without a slash at its end. `log`: the log of all the server's processes, in JSON."""

    url: str
    client: Client
    process: HttpProcess | None = None
    log: Path | None = None


@contextmanager
def serving(endpoint: str, model: Path, folder: Path, **settings: object) -> Iterator[RunningServer]:
    """Serves HTTP for a running cluster, whose clients' endpoint is `endpoint`."""
    listener = HttpListener(HttpSettings(port=0, **settings))  # type: ignore[arg-type]
    process = HttpProcess(listener, endpoint, find_model(str(model)), folder, ServeSettings())
    try:
        wait_until_up(listener.url, process)
        yield RunningServer(listener.url, Client(endpoint), process)
    finally:
        process.close()
        listener.close()


@contextmanager
def serve_command(pair: Pair, log: Path) -> Iterator[RunningServer]:
    """Runs `outrider serve` with a pair, as an operator does; it must exit with 0 and stop HTTP."""
    models = ("--model", str(pair.target), "--draft-model", str(pair.draft))
    line = python("-m", "outrider", "serve", *models, "--port", "0", "--log-format", "json", "--log-level", "info")
    with log.open("wb") as stderr:
        process = subprocess.Popen(line, env=child_environment(), stdout=subprocess.PIPE, stderr=stderr, text=True)
    endpoints = dict(process.stdout.readline().strip().split(": ", 1) for _ in range(3)) if process.stdout else {}
    try:
        wait_until_up(endpoints["HTTP"])
        yield RunningServer(endpoints["HTTP"], Client(endpoints["clients"]), log=log)
    finally:
        process.terminate()
        ended = process.wait(START_SECONDS)
    if ended != 0 or responds(endpoints["HTTP"]):
        raise RuntimeError(f"outrider serve ended with {ended}, and HTTP {'after' if ended else 'not with'} it")


def responds(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.TransportError:
        return False
    return True


def wait_until_up(url: str, process: HttpProcess | None = None) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if process is not None:
            process.check()
        if responds(url):
            return
        time.sleep(0.05)
    raise TimeoutError(f"there is no answer from {url}")
