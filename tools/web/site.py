"""Runs an HTTP server for a cluster, and reads the memory and CPU time of its process."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
        process = listener.serve(cluster.endpoint, model, Path(folder), "warning")
        try:
            _wait_until_up(listener.url, process)
            yield Site(listener.url, process)
        finally:
            process.close()
            listener.close()


def _wait_until_up(url: str, process: HttpProcess) -> None:
    until = time.monotonic() + START_TIMEOUT_SECONDS
    while time.monotonic() < until:
        process.check()
        try:
            with urlopen(f"{url}/health", timeout=REQUEST_TIMEOUT_SECONDS):
                return
        except OSError:
            time.sleep(0.05)
    raise WorkerError(f"the HTTP server does not answer at {url}, although its process runs")
