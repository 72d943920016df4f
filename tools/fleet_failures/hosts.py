"""Fake hosts of Ray on this machine: each a raylet with what it says it offers. All of them on loopback, with a token.

A host that is lost dies with everything on it. Its connections are closed by the kernel: a machine whose power goes is
silent instead, which only heartbeats tell.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from outrider.target_worker.rank_link import free_ports

OFFERS: tuple[Mapping[str, float], ...] = ({"metal": 1}, {"metal": 1}, {"ane": 2}, {"ane": 2})
"""Beside the head."""
PORTS = ("dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_agent_port", "metrics_export_port")
"""Given beforehand: for a port that is asked for when it starts a raylet waits fifteen seconds, and then ends."""
HEAD_AWAY_SECONDS = 2.0
"""So long nobody is there in the head's place."""


class Hosts:
    """The head and the others."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def of(self, process: psutil.Process) -> Any:
        """The host that the process runs on."""
        above = {process.pid, *(one.pid for one in process.parents())}
        return next(node for node in self._cluster.list_all_nodes() if _raylet(node).pid in above)

    def loss(self, node: Any) -> Callable[[], None]:
        """What loses this host, with all that runs on it."""
        raylet = _raylet(node)
        doomed = [raylet, *raylet.children(recursive=True)]

        def lose() -> None:
            for one in doomed:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)

        return lose

    def replaced(self, node: Any, offers: Mapping[str, float]) -> None:
        """Another host joins in the place of one that is lost."""
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(wait=False, num_cpus=1, resources=dict(offers), **_ports())

    def head_again(self) -> None:
        """The head's process (GCS) is started again over what it wrote down."""
        time.sleep(HEAD_AWAY_SECONDS)
        self._cluster.head_node.kill_gcs_server(check_alive=False)  # it is dead; the books are told so
        self._cluster.head_node.start_gcs_server()

    @property
    def gcs(self) -> psutil.Process:
        """The process that knows all others."""
        (found,) = self._cluster.head_node.all_processes["gcs_server"]
        return psutil.Process(found.process.pid)

    def named(self, title: str) -> psutil.Process:
        """The one process of all hosts whose title begins so."""
        everyone = [one for node in self._cluster.list_all_nodes() for one in _raylet(node).children(recursive=True)]
        (found,) = [one for one in everyone if _title(one).startswith(title)]
        return found


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Five of them, to which this process is connected."""
    with tempfile.TemporaryDirectory(prefix="orf", ignore_cleanup_errors=True) as folder:
        _settle(Path(os.environ.get("RAY_TMPDIR", folder)), Path(folder))
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        logging.getLogger(serve.__name__).setLevel(logging.ERROR)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **_ports()})
        try:
            for offers in OFFERS:
                cluster.add_node(wait=False, num_cpus=1, resources=dict(offers), **_ports())
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            cluster.wait_for_nodes()
            yield Hosts(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()


def _settle(logs: Path, own: Path) -> None:
    """What Ray reads of the environment, before it is imported."""
    (logs / "ray").mkdir(parents=True, exist_ok=True)
    (own / "gcs").mkdir()
    (own / "token").write_text(secrets.token_hex(32), encoding="ascii")
    os.environ.update({
        "RAY_TMPDIR": str(logs),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(own / "token"),
        "RAY_gcs_storage": "rocksdb",
        "RAY_gcs_storage_path": str(own / "gcs"),
    })  # fmt: skip


def _ports() -> dict[str, int]:
    """For a host's own processes, free a moment ago."""
    return dict(zip(PORTS, free_ports(len(PORTS)), strict=True))


def _raylet(node: Any) -> psutil.Process:
    (found,) = node.all_processes["raylet"]
    return psutil.Process(found.process.pid)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""
