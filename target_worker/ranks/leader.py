"""Rank 0's end of the line: who is let in, what all are told, and whether all have done it."""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress

import zmq

from outrider.engine.ranks import Ranks
from outrider.protocol.codec import decode_all, encode_all
from outrider.protocol.errors import ModelError, WorkerError
from outrider.protocol.messages import Fault, Hello, Message, Ping, Pong, RankHello, Shutdown, Welcome
from outrider.target_worker.ranks.line import FAREWELL_MS, Line, name_of, own_address

ANSWER_MS = 10_000
STRANGER_SECONDS = 5.0


class Leader(Line):
    """Rank 0's end."""

    def __init__(self, ranks: Ranks, when_lost: Callable[[], None] = lambda: None) -> None:
        """Waits until all ranks have come so far. Raises WorkerError where no socket can be opened."""
        super().__init__(zmq.ROUTER, ranks, when_lost)
        self._secret, address = secrets.token_bytes(16), own_address()
        self._socket.curve_server = True
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{address}")
            self._door = socket.create_server((address, 0))
        except (zmq.ZMQError, OSError) as error:
            raise WorkerError(
                f"rank 0 can't listen at {address} ({error}); expected an address of this host first in the hostfile"
            ) from None
        threading.Thread(target=self._let_in, daemon=True, name="ranks").start()
        # Nobody else is told the key and the secret, so nobody else gets in.
        told = [address, port, self._door.getsockname()[1], self._key, self._secret.hex()]
        ranks.told(json.dumps(told).encode())
        self.here = 1

    def _let_in(self) -> None:
        """Watches the connection of each rank; strangers are sent away."""
        left = self.ranks.size - 1
        with self._door, suppress(OSError):
            while left:
                lifeline, _ = self._door.accept()
                if self._knows(lifeline):
                    self._watch(lifeline)
                    left -= 1
                else:
                    lifeline.close()

    def _knows(self, lifeline: socket.socket) -> bool:
        lifeline.settimeout(STRANGER_SECONDS)
        try:
            said = lifeline.recv(len(self._secret), socket.MSG_WAITALL)
        except OSError:
            return False
        lifeline.settimeout(None)
        return secrets.compare_digest(said, self._secret)

    def admit(self, own: RankHello) -> None:
        """Waits for each rank's hello; `here` says from then on how many are on this machine.

        Raises:
            WorkerError: one runs something else.
        """
        hosts = [own.host]
        for message in self._from_all():
            if not isinstance(message, RankHello):
                raise WorkerError(f"a rank began with {type(message).__name__}; expected RankHello: restart all ranks")
            why = unlike(own, message)
            if why is not None:
                raise WorkerError(why)
            hosts.append(message.host)
        self.here = hosts.count(own.host)
        self.tell(Welcome("rank"))

    def agree(self, own: Hello) -> None:
        """Waits until all have loaded and tried the model. Raises ModelError when one has found something else."""
        for message in self._from_all():
            if not isinstance(message, Hello) or what_it_is(message) != what_it_is(own):
                raise ModelError(
                    f"the ranks measured different abilities of the same model ({message} and {own}); expected"
                    " machines of one kind"
                )

    def tell(self, *messages: Message) -> None:
        """All ranks hear these, in this order."""
        frames = encode_all(messages)
        for rank in range(1, self.ranks.size):
            self._socket.send_multipart([name_of(rank), *frames])

    def assure(self) -> None:
        """Returns when all ranks are there and have done what they were told; else all end.

        What fails on rank 0 may have failed for the death of another, and must then not be called a request's fault.
        """
        self.tell(Ping(0))
        left = self.ranks.size - 1
        while left:
            if not self._socket.poll(ANSWER_MS):
                self._lose()
            left -= isinstance(decode_all(self._socket.recv_multipart()[1:])[0], Pong)

    def close(self) -> None:
        """Ends the others in order, who have a while to answer."""
        self.end()
        with suppress(zmq.ZMQError):
            self.tell(Shutdown())
            left = self.ranks.size - 1
            while left and self._socket.poll(FAREWELL_MS):
                left -= isinstance(decode_all(self._socket.recv_multipart()[1:])[0], Shutdown)
        super().close()

    def _from_all(self) -> Iterable[Message]:
        """The next word of each other rank. Raises WorkerError when one tells of its failure instead."""
        for _ in range(1, self.ranks.size):
            identity, *frames = self._socket.recv_multipart()
            (message,) = decode_all(frames)
            if isinstance(message, Fault):
                raise WorkerError(f"rank {identity.decode()}: {message.message}")
            yield message


def unlike(own: RankHello, other: RankHello) -> str | None:
    """Why this rank can't be one of rank 0's; None when it can."""
    for what, mine, theirs in (
        ("as one of so many ranks", own.size, other.size),
        ("with the releases", own.runs, other.runs),
        ("with the weights", own.weights[:12], other.weights[:12]),
    ):
        if mine != theirs:
            return f"rank {other.rank} runs {what}: {theirs}, and rank 0: {mine}; expected the same of all ranks"
    return None


def what_it_is(hello: Hello) -> tuple[object, ...]:
    """What all ranks have to agree about."""
    return hello.vocab_size, hello.context_length, hello.parameters, hello.weight_bytes, hello.abilities, hello.note
