"""Things that arrive for one reader come in their order, and silence is told."""

from __future__ import annotations

import asyncio

from outrider.server.answers.line import Line

SOON, LATE = 0.01, 3600.0


def test_what_is_there_is_taken_at_once_and_in_order() -> None:
    async def read() -> list[int]:
        line = Line[int]()
        for one in range(3):
            line.put(one)
        return await line.take(LATE)

    assert asyncio.run(read()) == [0, 1, 2]


def test_who_waits_is_woken_by_what_comes() -> None:
    async def read() -> list[list[int]]:
        line, taken = Line[int](), list[list[int]]()
        for one in range(3):
            waiting = asyncio.create_task(line.take(LATE))
            await asyncio.sleep(0)
            line.put(one)
            taken.append(await waiting)
        line.close()
        return taken

    assert asyncio.run(read()) == [[0], [1], [2]]


def test_silence_is_told_again_and_again_whatever_patience_was_before() -> None:
    async def read() -> list[list[int]]:
        line = Line[int]()
        waiting = asyncio.create_task(line.take(LATE))
        await asyncio.sleep(0)
        line.put(1)
        return [await waiting, await line.take(SOON), await line.take(SOON)]

    assert asyncio.run(read()) == [[1], [], []]


def test_an_alarm_that_was_set_for_one_wait_does_not_end_the_next() -> None:
    """It rings while somebody waits who began later, and is set again for them."""

    async def read() -> list[int]:
        line = Line[int]()
        first = asyncio.create_task(line.take(SOON))
        await asyncio.sleep(0)
        line.put(1)
        await first
        second = asyncio.create_task(line.take(LATE))
        await asyncio.sleep(4 * SOON)
        line.put(2)
        return await second

    assert asyncio.run(read()) == [2]


def test_who_stops_waiting_loses_nothing() -> None:
    async def read() -> list[int]:
        line = Line[int]()
        waiting = asyncio.create_task(line.take(LATE))
        await asyncio.sleep(0)
        line.put(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        line.put(2)
        return await line.take(LATE)

    assert asyncio.run(read()) == [1, 2]
