"""The pieces of a streamed answer, written straight to its connection.

In ASGI each of them would pass every layer of the application, and h11, though all of these only look at how an answer
begins and ends. Knows uvicorn's connections, and how HTTP/1.1 marks a piece.
"""

from __future__ import annotations

from starlette.types import Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

_NAME = "outrider.pieces"


class Pieces:
    """Of an answer that has begun by `send`, and is to end by it, written as any answer is."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def write(self, data: bytes) -> None:
        """Returns when there is room for more."""
        if data:  # an empty piece would be the end
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


class Straight(Pieces):
    """Written to the connection itself."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        super().__init__(cycle.send)  # type: ignore[arg-type]
        self._cycle = cycle

    @property
    def is_free(self) -> bool:
        """Whether the reader keeps up, so that something can be `put`."""
        return not self._cycle.flow.write_paused

    def put(self, data: bytes) -> None:
        """Writes without waiting; whoever has left gets nothing."""
        if data and not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def write(self, data: bytes) -> None:
        if self._cycle.flow.write_paused and not self._cycle.disconnected:
            await self._cycle.flow.drain()
        self.put(data)


def offer(cycle: RequestResponseCycle) -> None:
    """Has `pieces` find the way to this answer's connection; not in HTTP/1.0, where pieces have no marks."""
    if cycle.scope["http_version"] == "1.1":
        extensions: dict[str, object] = cycle.scope.setdefault("extensions", {})  # type: ignore[assignment]
        extensions[_NAME] = Straight(cycle)


def pieces(scope: Scope, send: Send) -> Pieces:
    """Of the answer in this scope: straight ones where its connection offers that."""
    found: Pieces = scope.get("extensions", {}).get(_NAME) or Pieces(send)
    return found
