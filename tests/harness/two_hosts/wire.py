"""A link in a process of its own, for kernels without netem: takes packets from one TUN device to another.

    python -m tests.harness.two_hosts.wire FD FD SEED

The file descriptors are the devices'. Each packet is lost by chance or comes out later, in order, as in netem. A line
of stdin shapes both ways from then on: the delay of each in seconds, and the share that is lost. Ends with stdin.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

from outrider.orchestrator.machine.spawn import child_environment, python
from tests.harness.two_hosts.namespace import Namespace

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MOST_BYTES = 65_535


def device(host: Namespace, name: str) -> int:
    """A TUN device in this namespace; it is gone when the file is closed."""
    with host.entered():
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


class Wire:
    """The process, and how it is told. Between devices of these names in two namespaces."""

    def __init__(self, here: Namespace, there: Namespace, names: tuple[str, str], seed: int) -> None:
        fds = [device(here, names[0]), device(there, names[1])]
        self._process = subprocess.Popen(
            python("-m", "tests.harness.two_hosts.wire", *map(str, fds), str(seed)),
            stdin=subprocess.PIPE,
            env=child_environment(),
            pass_fds=fds,
            text=True,
        )
        for fd in fds:
            os.close(fd)

    def shape(self, delay_ms: float, loss: float) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(f"{delay_ms / 1000} {loss}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


class Relay:
    """Packets on their way between the devices `fds`; what `orders` says shapes them, and its end ends them."""

    def __init__(self, fds: tuple[int, int], orders: int, seed: int) -> None:
        self._ways = {fds[0]: fds[1], fds[1]: fds[0]}
        self._orders = orders
        self._said = b""
        self._going: dict[int, deque[tuple[float, bytes]]] = {fd: deque() for fd in fds}
        self._chance = random.Random(seed)
        self._delay = self._loss = 0.0

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([*self._ways, self._orders], [], [], self._wait())
            if self._orders in ready and not self._told():
                return
            for fd in self._ways:
                if fd in ready:
                    self._take(fd)
            self._give()

    def _told(self) -> bool:
        """Obeys the orders that are whole by now; False: there will be no more."""
        data = os.read(self._orders, MOST_BYTES)
        *lines, self._said = (self._said + data).split(b"\n")
        for line in lines:
            self._delay, self._loss = map(float, line.split())
        return bool(data)

    def _wait(self) -> float | None:
        due = min((going[0][0] for going in self._going.values() if going), default=None)
        return None if due is None else max(due - time.perf_counter(), 0.0)

    def _take(self, fd: int) -> None:
        due = time.perf_counter() + self._delay
        while True:
            try:
                packet = os.read(fd, MOST_BYTES)
            except OSError:  # nothing more, or the device is down
                return
            if self._chance.random() >= self._loss:
                self._going[self._ways[fd]].append((due, packet))

    def _give(self) -> None:
        now = time.perf_counter()
        for fd, going in self._going.items():
            while going and going[0][0] <= now:
                _, packet = going.popleft()
                try:
                    os.write(fd, packet)
                except OSError:  # the device is down: lost like on any cut cable
                    continue


if __name__ == "__main__":
    Relay((int(sys.argv[1]), int(sys.argv[2])), sys.stdin.fileno(), int(sys.argv[3])).run()
