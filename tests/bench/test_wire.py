"""The relay of packets between two hosts: packets arrive whole and in order, with the requested loss."""

from __future__ import annotations

import os
import socket
import sys
import threading

import pytest

from tests.harness.two_hosts.packet_relay import PacketForwarder

COUNT = 200


def received(end: socket.socket) -> list[int]:
    """Returns the numbers of all packets that arrive before `end`."""
    found = []
    while (packet := end.recv(4096)) != b"end":
        found.append(int(packet))
    return found


def arrived_packets(loss: float, seed: int) -> list[int]:
    """Returns which of the packets arrive at the other end."""
    (near, one), (far, other) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    for end in (one, other):
        end.setblocking(False)
    orders, order_pipe = os.pipe()
    carrying = threading.Thread(target=PacketForwarder((one.fileno(), other.fileno()), orders, seed).run)
    carrying.start()
    found: list[int] = []
    receiving = threading.Thread(target=lambda: found.extend(received(far)))
    receiving.start()
    os.write(order_pipe, f"0.5 1\n0.001 {loss}\n".encode())
    for number in range(COUNT):
        near.send(str(number).encode())
    for _ in range(50):  # one of them gets through
        near.send(b"end")
    receiving.join()
    os.close(order_pipe)
    carrying.join()
    for end in (near, one, far, other):
        end.close()
    os.close(orders)
    return found


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no such sockets")
def test_packets_that_are_not_lost_arrive_in_order() -> None:
    assert arrived_packets(0.0, 0) == list(range(COUNT))
    some = arrived_packets(0.2, 1)
    assert some == sorted(some) and 0.7 * COUNT < len(some) < 0.9 * COUNT
    assert arrived_packets(0.2, 1) == some != arrived_packets(0.2, 2)
