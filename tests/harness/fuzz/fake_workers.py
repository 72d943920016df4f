"""Fake workers without models that send valid messages: a target, and a drafter that drafts one right branch.

The text of a request is a function of its name and the position, so that every token can be checked.
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


def token_at(request: str, position: int) -> int:
    """Returns the token at this position of the request's text."""
    return zlib.crc32(f"{request} {position}".encode()) % VOCABULARY


class Peer:
    """The two sockets of a worker process: one for messages, one for heartbeats."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, role: str, incarnation: int) -> None:
        self.role, self.incarnation, self.name = role, incarnation, ""
        main = routing_id(incarnation)
        self.main, self.heartbeat = (_dealer(context, endpoint, identity) for identity in (main, heartbeat_id(main)))

    def hello(self, name: str = "") -> None:
        self.send(Hello(self.role, name, 1, "stand-in", "m", VOCABULARY, 1 << 20, 1, 1, incarnation=self.incarnation))

    def send(self, *messages: Message) -> None:
        self.main.send_multipart(encode_all(messages))

    def send_frames(self, frames: Frames, heartbeat: bool) -> None:
        """Sends frames, also invalid ones, through the heartbeat socket or the other one."""
        (self.heartbeat if heartbeat else self.main).send_multipart(frames or [b""])

    def received(self) -> list[Message]:
        """Returns all messages that have arrived."""
        messages: list[Message] = []
        while self.main.poll(0):
            messages += decode_all(self.main.recv_multipart())
        while self.heartbeat.poll(0):
            self.heartbeat.recv_multipart()
        for message in messages:
            if isinstance(message, Welcome):
                self.name = message.name
        return messages

    def close(self) -> None:
        self.main.close(linger=0)
        self.heartbeat.close(linger=0)


def target_answers(message: Message) -> list[Message]:
    """Returns a target's correct answers to a message."""
    match message:
        case Open():
            position = len(message.tokens)
            return [
                Outcome(
                    message.request,
                    message.epoch,
                    message.round,
                    position,
                    0,
                    token_at(message.request, position),
                    _span(),
                )
            ]
        case Verify():
            expected = [token_at(message.request, message.base_len + i) for i in range(len(message.chain) + 1)]
            pairs = zip(message.chain, expected, strict=False)
            accepted = next((i for i, (drafted, right) in enumerate(pairs) if drafted != right), len(message.chain))
            position_fields = (message.request, message.epoch, message.round, message.base_len)
            return [Outcome(*position_fields, accepted, expected[accepted], _span())]
    return []


def drafter_answers(message: Message) -> list[Message]:
    """Returns a drafter's correct answers to a message. Its branches are the right one and a wrong one."""
    if not isinstance(message, Commit):
        return []
    base_len = after = message.base_len
    position = message.request, message.epoch, message.round, base_len
    if message.verifying is None:
        chain = tuple(token_at(message.request, after + i) for i in range(message.depth))
        return [Drafted(*position, chain, _span())] if message.depth else []
    accepted = message.verifying
    messages = []
    for depth in range(1, message.depth + 1):
        after = base_len + len(accepted)
        right = [token_at(message.request, after + i) for i in range(depth + 1)]
        entries = (Branch((*accepted, right[0]), tuple(right[1:])), Branch((*accepted, 1), (2,)))[: message.branches]
        messages.append(Branches(*position, entries, _span(), final=depth == message.depth))
    return list(messages)


def _span() -> Span:
    return Span(now(), now())


def _dealer(context: zmq.Context[Any], endpoint: str, identity: bytes) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(endpoint)
    return socket
