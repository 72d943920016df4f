"""A simulated Ray cluster of several hosts, created once a session for the tests with the mark `fleet`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from outrider import __version__
from outrider.fleet.host import VERSION_LABEL
from tests.fleet.running_fleet import plain_text

HOSTS = ({"metal": 1}, {"metal": 1}, {"ane": 2})


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head, two hosts with a GPU and one with a Neural Engine, all on this machine."""
    folder = Path(tmp_path_factory.mktemp("ray"))
    settings = {
        "RAY_TMPDIR": str(folder),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
    }
    (folder / "ray").mkdir()
    (folder / "token").write_text("a" * 64)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster
        from ray.exceptions import RayError

        head = {"num_cpus": 2, "include_dashboard": False, "labels": {VERSION_LABEL: __version__}}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for resources in HOSTS:
            cluster.add_node(num_cpus=1, resources=resources)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
        with suppress(RayError):  # a test has ended Serve itself
            serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="session")
def expected_text() -> str:
    """The text that the target generates without a drafter."""
    return plain_text()
