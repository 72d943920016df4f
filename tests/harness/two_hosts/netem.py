"""A link whose delay and loss the kernel simulates: a veth pair, with netem for the outgoing packets of each end."""

from __future__ import annotations

import shutil

from outrider.protocol.errors import WorkerError
from tests.harness.two_hosts.namespace import Namespace


def has_netem() -> bool:
    """Whether this kernel has netem; many are built without it."""
    if shutil.which("tc") is None:
        return False
    host = Namespace()
    try:
        host.run("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except WorkerError:
        return False
    finally:
        host.close()
    return True


class Cable:
    """A veth pair: a device with a name of `names` in each of the two namespaces."""

    def __init__(self, here: Namespace, there: Namespace, names: tuple[str, str]) -> None:
        self._ends = ((here, names[0]), (there, names[1]))
        here.ip("link", "add", names[0], "type", "veth", "peer", "name", names[1], "netns", there.path)
        for host, name in self._ends:  # without segmentation offload, so that packets are lost one by one
            host.ip("link", "set", name, "gso_max_segs", "1")

    def shape(self, delay_ms: float, loss: float) -> None:
        shape = ("delay", f"{round(delay_ms * 1000)}us", "loss", f"{loss:.4%}", "limit", "10000")
        for host, name in self._ends:
            host.run("tc", "qdisc", "replace", "dev", name, "root", "netem", *shape)

    def close(self) -> None:
        """Does nothing: the kernel removes the cable with its namespaces."""
