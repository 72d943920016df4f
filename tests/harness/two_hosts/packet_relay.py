"""A link that a process simulates, for kernels without netem: it forwards packets between two TUN devices.

    python -m tests.harness.two_hosts.packet_relay FD FD SEED

FD are the file descriptors of the devices. Packets are delayed, in order, and lost at random, as with netem. Each line
of stdin sets the delay in seconds and the share of lost packets, for both directions. The process ends when stdin
closes.
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
MAX_PACKET_BYTES = 65_535


def device(host: Namespace, name: str) -> int:
    """Creates a TUN device in this namespace, and returns its file descriptor. It exists until that is closed."""
    with host.entered():
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


class PacketRelay:
    """Starts and controls the process, with a device of each name in one of the two namespaces."""

    def __init__(self, here: Namespace, there: Namespace, names: tuple[str, str], seed: int) -> None:
        fds = [device(here, names[0]), device(there, names[1])]
        self._process = subprocess.Popen(
            python("-m", "tests.harness.two_hosts.packet_relay", *map(str, fds), str(seed)),
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


class PacketForwarder:
    """Forwards packets between the devices `fds` until the file descriptor `control` is at its end.

    Each line of `control` sets the delay and the loss.
    """

    def __init__(self, fds: tuple[int, int], control: int, seed: int) -> None:
        self._peer_of = {fds[0]: fds[1], fds[1]: fds[0]}
        self._control = control
        self._partial_line = b""
        self._queues: dict[int, deque[tuple[float, bytes]]] = {fd: deque() for fd in fds}
        self._rng = random.Random(seed)
        self._delay = self._loss = 0.0

    def run(self) -> None:
        while True:
            ready, _, _ = select.select([*self._peer_of, self._control], [], [], self._time_until_due())
            if self._control in ready and not self._apply_settings():
                return
            for fd in self._peer_of:
                if fd in ready:
                    self._read_packets(fd)
            self._write_due_packets()

    def _apply_settings(self) -> bool:
        """Applies all complete lines of `control`. Returns False at its end."""
        data = os.read(self._control, MAX_PACKET_BYTES)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            self._delay, self._loss = map(float, line.split())
        return bool(data)

    def _time_until_due(self) -> float | None:
        due = min((queue[0][0] for queue in self._queues.values() if queue), default=None)
        return None if due is None else max(due - time.perf_counter(), 0.0)

    def _read_packets(self, fd: int) -> None:
        due = time.perf_counter() + self._delay
        while True:
            try:
                packet = os.read(fd, MAX_PACKET_BYTES)
            except OSError:  # no more packets, or the device is down
                return
            if self._rng.random() >= self._loss:
                self._queues[self._peer_of[fd]].append((due, packet))

    def _write_due_packets(self) -> None:
        now = time.perf_counter()
        for fd, queue in self._queues.items():
            while queue and queue[0][0] <= now:
                _, packet = queue.popleft()
                try:
                    os.write(fd, packet)
                except OSError:  # the device is down: the packet is lost, as on a cut cable
                    continue


if __name__ == "__main__":
    PacketForwarder((int(sys.argv[1]), int(sys.argv[2])), sys.stdin.fileno(), int(sys.argv[3])).run()
