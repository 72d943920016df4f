"""The pieces of a streamed answer, written straight to its connection.

In ASGI each of them would pass every layer of the application, and h11, though all of these only look at how an answer
begins and ends. Knows uvicorn's connections, and how HTTP/1.1 marks a piece.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

Write = Callable[[bytes], Awaitable[None]]
_NAME = "outrider.pieces"


def offer(cycle: RequestResponseCycle) -> None:
    """Has `straight` find the way to this answer's connection; not in HTTP/1.0, where pieces have no marks."""
    if cycle.scope["http_version"] != "1.1":
        return

    async def write(data: bytes) -> None:
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    extensions: dict[str, object] = cycle.scope.setdefault("extensions", {})  # type: ignore[assignment]
    extensions[_NAME] = write


def straight(scope: Scope, send: Send) -> Write:
    """What writes a piece, no empty one, of an answer that has begun by `send`, and is to end by it."""

    async def in_turn(data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})

    write: Write = scope.get("extensions", {}).get(_NAME, in_turn)
    return write
