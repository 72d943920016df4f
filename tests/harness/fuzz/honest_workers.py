"""Honest workers without models on the workers' socket: a target that knows each text, a drafter that knows most of it.

A request's text is a function of its name and the position, so that every token can be checked.
"""

from __future__ import annotations

import zlib
from typing import Any

import zmq

from outrider.protocol.clock import now
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.messages import (
    Branch,
    Branches,
    Commit,
    Drafted,
    Hello,
    Message,
    Open,
    Outcome,
    Span,
    Verify,
    Welcome,
)
from outrider.protocol.worker_link import heartbeat_id, routing_id
from tests.harness.fuzz.mutation import Frames

VOCABULARY = 5000


def token(request: str, place: int) -> int:
    """Returns the token at this position of the request's text."""
    return zlib.crc32(f"{request} {place}".encode()) % VOCABULARY


class Peer:
    """A worker process's sockets."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, role: str, incarnation: int) -> None:
        self.role, self.incarnation, self.name = role, incarnation, ""
        hot = routing_id(incarnation)
        self.hot, self.beat = (_dealer(context, endpoint, identity) for identity in (hot, heartbeat_id(hot)))

    def hello(self, name: str = "") -> None:
        self.send(Hello(self.role, name, self.incarnation, 1, "stand-in", "m", VOCABULARY, 1 << 20, 1, 1))

    def send(self, *messages: Message) -> None:
        self.hot.send_multipart(encode_all(messages))

    def send_frames(self, frames: Frames, beat: bool) -> None:
        """Sends any frames."""
        (self.beat if beat else self.hot).send_multipart(frames or [b""])

    def received(self) -> list[Message]:
        """Returns all messages that have arrived."""
        found: list[Message] = []
        while self.hot.poll(0):
            found += decode_all(self.hot.recv_multipart())
        while self.beat.poll(0):
            self.beat.recv_multipart()
        for message in found:
            if isinstance(message, Welcome):
                self.name = message.name
        return found

    def close(self) -> None:
        self.hot.close(linger=0)
        self.beat.close(linger=0)


def target(message: Message) -> list[Message]:
    """Returns an honest target's answers."""
    match message:
        case Open():
            place = len(message.tokens)
            return [
                Outcome(message.request, message.epoch, message.round, place, 0, token(message.request, place), _span())
            ]
        case Verify():
            own = [token(message.request, message.base_len + i) for i in range(len(message.chain) + 1)]
            pairs = zip(message.chain, own, strict=False)
            accepted = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), len(message.chain))
            of = (message.request, message.epoch, message.round, message.base_len)
            return [Outcome(*of, accepted, own[accepted], _span())]
    return []


def drafter(message: Message) -> list[Message]:
    """Returns an honest drafter's answers: the right branch, and a wrong one."""
    if not isinstance(message, Commit):
        return []
    base_len = after = message.base_len
    place = message.request, message.epoch, message.round, base_len
    if message.verifying is None:
        chain = tuple(token(message.request, after + i) for i in range(message.depth))
        return [Drafted(*place, chain, _span())] if message.depth else []
    accepted = message.verifying
    found = []
    for depth in range(1, message.depth + 1):
        after = base_len + len(accepted)
        right = [token(message.request, after + i) for i in range(depth + 1)]
        entries = (Branch((*accepted, right[0]), tuple(right[1:])), Branch((*accepted, 1), (2,)))[: message.branches]
        found.append(Branches(*place, entries, _span(), final=depth == message.depth))
    return list(found)


def _span() -> Span:
    return Span(now(), now())


def _dealer(context: zmq.Context[Any], endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    return socket
