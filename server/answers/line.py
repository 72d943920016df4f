"""What arrives for one reader in asyncio, in order; who waits for it hears of silence, too. Knows one event loop.

A queue within `asyncio.timeout` makes and cancels a timer for each thing that arrives. Here one goes on for as long as
somebody waits now and then, and wakes up no sooner than the silence may be over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """As long as it gets: who puts something in never waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._things: list[T] = []
        self._reader: asyncio.Future[None] | None = None
        self._at_once: Callable[[T], bool] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._patience = self._rings_at = self._until = 0.0

    def put(self, one: T) -> None:
        if self._at_once is not None and self._awaited is not None and self._at_once(one):
            self._until = self._loop.time() + self._patience
        else:
            self._things.append(one)
            self._wake()

    async def take(self, patience: float, at_once: Callable[[T], bool] | None = None) -> list[T]:
        """All there is; nothing after `patience` seconds in which nothing came.

        What comes while this waits is offered to `at_once` in the very turn of the loop that brings it, and is taken
        only if that returns False.
        """
        if not self._things:
            self._at_once = at_once
            await self._arrival(patience)
        found, self._things = self._things, []
        return found

    def close(self) -> None:
        """Nobody reads any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    async def _arrival(self, patience: float) -> None:
        self._patience, self._until = patience, self._loop.time() + patience
        if self._alarm is not None and self._until < self._rings_at:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._set_alarm()
        self._reader = self._loop.create_future()
        await self._reader

    def _set_alarm(self) -> None:
        self._rings_at = self._until
        self._alarm = self._loop.call_at(self._rings_at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._until <= self._rings_at:
            self._wake()
        else:
            self._set_alarm()  # something has come since it was set

    @property
    def _awaited(self) -> asyncio.Future[None] | None:
        """What a reader waits for who has not been woken yet."""
        return self._reader if self._reader is not None and not self._reader.done() else None

    def _wake(self) -> None:
        if (reader := self._awaited) is not None:
            reader.set_result(None)
