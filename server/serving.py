"""uvicorn's server, which sleeps while nobody asks.

Its own looks ten times a second whether it is to end; in a process that has left the caches each look costs as much as
half a chunk of text.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import FrameType

import uvicorn

TICK_SECONDS = 1.0
"""So often the date in answers is renewed."""


class Server(uvicorn.Server):
    """Serves until `end`, or a signal."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._word = asyncio.Event()

    def end(self) -> None:
        """Ends it in order, from any thread."""
        self.should_exit = True
        self._wake()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._wake()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # of its ticks the one that tells the time
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._word.wait()

    def _wake(self) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._word.set)
