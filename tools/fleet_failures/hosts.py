"""Simulated hosts of Ray on this machine: each is a raylet with declared resources, on loopback, with a token.

A killed host loses all its processes, and the kernel closes their connections. A machine that loses power would be
silent instead, which only heartbeats detect.
"""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from outrider.fleet.host import FleetHost, create_token, set_ray_environment
from outrider.target_worker.rank_link import free_ports

HOST_RESOURCES: tuple[Mapping[str, float], ...] = ({"metal": 1}, {"metal": 1}, {"ane": 2}, {"ane": 2})
"""The resources of the hosts besides the head."""
PORT_OPTIONS = ("dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_agent_port", "metrics_export_port")
"""Ports to choose beforehand: a raylet that has to ask for one at start waits fifteen seconds, and then ends."""
HEAD_AWAY_SECONDS = 2.0
"""Seconds without a head before it is restarted."""


class Hosts:
    """The head and the other hosts."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def of(self, process: psutil.Process) -> Any:
        """Returns the host that the process runs on."""
        ancestors = {process.pid, *(parent.pid for parent in process.parents())}
        return next(node for node in self._cluster.list_all_nodes() if _raylet(node).pid in ancestors)

    def loss(self, node: Any) -> Callable[[], None]:
        """Returns a function that kills this host with all its processes."""
        raylet = _raylet(node)
        processes = [raylet, *raylet.children(recursive=True)]

        def lose() -> None:
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)

        return lose

    def replace(self, node: Any, offers: Mapping[str, float]) -> None:
        """Adds a host with these resources in place of a lost one."""
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(wait=False, num_cpus=1, resources=dict(offers), **_ports())

    def restart_head(self) -> None:
        """Starts the head's process (GCS) again over its stored state."""
        time.sleep(HEAD_AWAY_SECONDS)
        self._cluster.head_node.kill_gcs_server(check_alive=False)  # it is dead; this updates Ray's records
        self._cluster.head_node.start_gcs_server()

    @property
    def gcs(self) -> psutil.Process:
        """The head's process."""
        (server,) = self._cluster.head_node.all_processes["gcs_server"]
        return psutil.Process(server.process.pid)

    def named(self, title: str) -> psutil.Process:
        """Returns the only process of all hosts whose title begins with `title`."""
        nodes = self._cluster.list_all_nodes()
        processes = [process for node in nodes for process in _raylet(node).children(recursive=True)]
        (named,) = [process for process in processes if _title(process).startswith(title)]
        return named


@contextmanager
def run_hosts() -> Iterator[Hosts]:
    """Runs five hosts, and connects this process to them."""
    with tempfile.TemporaryDirectory(prefix="orf", ignore_cleanup_errors=True) as folder:
        _configure(Path(os.environ.get("RAY_TMPDIR", folder)), Path(folder))
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        logging.getLogger(serve.__name__).setLevel(logging.ERROR)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **_ports()})
        try:
            for offers in HOST_RESOURCES:
                cluster.add_node(wait=False, num_cpus=1, resources=dict(offers), **_ports())
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            cluster.wait_for_nodes()
            yield Hosts(cluster)
        finally:
            ray.shutdown()
            cluster.shutdown()


def _configure(logs: Path, own: Path) -> None:
    """Sets the environment that Ray reads when it is imported, as `outrider fleet` does."""
    (logs / "ray").mkdir(parents=True, exist_ok=True)
    (own / "gcs").mkdir()
    os.environ["RAY_TMPDIR"] = str(logs)
    set_ray_environment(FleetHost(own).environment("127.0.0.1:0", create_token(own)))


def _ports() -> dict[str, int]:
    """Returns free ports for a host's own processes."""
    return dict(zip(PORT_OPTIONS, free_ports(len(PORT_OPTIONS)), strict=True))


def _raylet(node: Any) -> psutil.Process:
    (raylet,) = node.all_processes["raylet"]
    return psutil.Process(raylet.process.pid)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""
