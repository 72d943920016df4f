"""A link as a process, for kernels without netem: forwards packets between two TUN devices.

    python -m tests.harness.two_hosts.wire FD FD SEED

The file descriptors are the devices'. Each packet is randomly lost or delayed, in order, as with netem. A line of stdin
sets the delay in seconds and the loss of both directions. The process ends when stdin closes.
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
    """Creates a TUN device in this namespace, which exists until the file is closed. Returns the descriptor."""
    with host.entered():
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


class Wire:
    """Runs and controls the process, between devices with these names in two namespaces."""

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
    """Forwards packets between the devices `fds`, as set by lines of `orders`, until `orders` ends."""

    def __init__(self, fds: tuple[int, int], orders: int, seed: int) -> None:
        self._ways = {fds[0]: fds[1], fds[1]: fds[0]}
        self._orders = orders
        self._unread = b""
        self._going: dict[int, deque[tuple[float, bytes]]] = {fd: deque() for fd in fds}
        self._chance = random.Random(seed)
        self._delay = self._loss = 0.0

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([*self._ways, self._orders], [], [], self._wait())
            if self._orders in ready and not self._apply_orders():
                return
            for fd in self._ways:
                if fd in ready:
                    self._take(fd)
            self._give()

    def _apply_orders(self) -> bool:
        """Applies all complete orders. Returns False at the end of the orders."""
        data = os.read(self._orders, MOST_BYTES)
        *lines, self._unread = (self._unread + data).split(b"\n")
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
            except OSError:  # no more packets, or the device is down
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
                except OSError:  # the device is down: the packet is lost, as on a cut cable
                    continue


if __name__ == "__main__":
    Relay((int(sys.argv[1]), int(sys.argv[2])), sys.stdin.fileno(), int(sys.argv[3])).run()
