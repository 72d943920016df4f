"""Runs an HTTP server for a cluster, and reads the memory and CPU time of its process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import urlopen

import psutil

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.http_settings import HttpSettings
from outrider.orchestrator.machine.http_process import HttpListener, HttpProcess
from outrider.orchestrator.pairing.model_files import ModelFiles
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import WorkerError

START_TIMEOUT_SECONDS, REQUEST_TIMEOUT_SECONDS = 60.0, 5.0


@dataclass(frozen=True, slots=True)
class Site:
    """A running HTTP server. `url` does not end with a slash."""

    url: str
    process: HttpProcess

    @property
    def resident(self) -> int:
        """Resident memory in bytes."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """Seconds of user and system CPU time since its start."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


@contextmanager
def run_site(cluster: LocalCluster, model: ModelFiles, **settings: object) -> Iterator[Site]:
    """Runs HTTP for a cluster that serves `model`; `settings` are those of HttpSettings.

    Raises:
        WorkerError: the server does not start.
    """
    listener = HttpListener(HttpSettings(port=0, **settings))  # type: ignore[arg-type]
    with TemporaryDirectory() as folder:
        process = HttpProcess(listener, cluster.endpoint, model, Path(folder), ServeSettings())

        def is_alive() -> bool:
            process.check()
            return True

        try:
            if not wait_for_url(f"{listener.url}/health", is_alive, START_TIMEOUT_SECONDS):
                raise WorkerError(f"the HTTP server does not answer at {listener.url}, although its process runs")
            yield Site(listener.url, process)
        finally:
            process.close()
            listener.close()


def wait_for_url(url: str, is_alive: Callable[[], bool], timeout_s: float) -> bool:
    """Waits until a GET of `url` succeeds, and returns True; False if the server has ended, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and is_alive():
        try:
            with urlopen(url, timeout=REQUEST_TIMEOUT_SECONDS):
                return True
        except OSError:
            time.sleep(0.05)
    return False
