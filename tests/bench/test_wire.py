"""The link that a process carries: packets arrive whole and in order, with the requested loss."""

from __future__ import annotations

import os
import socket
import threading

from tests.harness.two_hosts.wire import Relay

COUNT = 200


def heard(end: socket.socket) -> list[int]:
    """Returns the numbers of all packets that arrive before `end`."""
    found = []
    while (packet := end.recv(4096)) != b"end":
        found.append(int(packet))
    return found


def sent(loss: float, seed: int) -> list[int]:
    """Returns which of the packets arrive at the other end."""
    (near, one), (far, other) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    for end in (one, other):
        end.setblocking(False)
    orders, said = os.pipe()
    carrying = threading.Thread(target=Relay((one.fileno(), other.fileno()), orders, seed).run)
    carrying.start()
    found: list[int] = []
    hearing = threading.Thread(target=lambda: found.extend(heard(far)))
    hearing.start()
    os.write(said, f"0.5 1\n0.001 {loss}\n".encode())
    for number in range(COUNT):
        near.send(str(number).encode())
    for _ in range(50):  # one of them gets through
        near.send(b"end")
    hearing.join()
    os.close(said)
    carrying.join()
    for end in (near, one, far, other):
        end.close()
    os.close(orders)
    return found


def test_packets_that_are_not_lost_arrive_in_order() -> None:
    assert sent(0.0, 0) == list(range(COUNT))
    some = sent(0.2, 1)
    assert some == sorted(some) and 0.7 * COUNT < len(some) < 0.9 * COUNT
    assert sent(0.2, 1) == some != sent(0.2, 2)
