"""Items for one reader arrive in order, and a timeout reports silence."""

from __future__ import annotations

import asyncio

from outrider.server.answers.run import NewsQueue

SOON, LATE = 0.01, 3600.0


def test_queued_items_are_taken_at_once_and_in_order() -> None:
    async def read() -> list[int]:
        line = NewsQueue[int]()
        for one in range(3):
            line.put(one)
        return await line.take(LATE)

    assert asyncio.run(read()) == [0, 1, 2]


def test_a_waiting_reader_is_woken_by_a_new_item() -> None:
    async def read() -> list[list[int]]:
        line, taken = NewsQueue[int](), list[list[int]]()
        for one in range(3):
            waiting = asyncio.create_task(line.take(LATE))
            await asyncio.sleep(0)
            line.put(one)
            taken.append(await waiting)
        line.close()
        return taken

    assert asyncio.run(read()) == [[0], [1], [2]]


def test_silence_is_reported_repeatedly_whatever_the_previous_timeout() -> None:
    async def read() -> list[list[int]]:
        line = NewsQueue[int]()
        waiting = asyncio.create_task(line.take(LATE))
        await asyncio.sleep(0)
        line.put(1)
        return [await waiting, await line.take(SOON), await line.take(SOON)]

    assert asyncio.run(read()) == [[1], [], []]


def test_an_alarm_that_was_set_for_one_wait_does_not_end_the_next() -> None:
    """It fires during a later wait, and is set again for that one."""

    async def read() -> list[int]:
        line = NewsQueue[int]()
        first = asyncio.create_task(line.take(SOON))
        await asyncio.sleep(0)
        line.put(1)
        await first
        second = asyncio.create_task(line.take(LATE))
        await asyncio.sleep(4 * SOON)
        line.put(2)
        return await second

    assert asyncio.run(read()) == [2]


def test_a_cancelled_wait_loses_nothing() -> None:
    async def read() -> list[int]:
        line = NewsQueue[int]()
        waiting = asyncio.create_task(line.take(LATE))
        await asyncio.sleep(0)
        line.put(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        line.put(2)
        return await line.take(LATE)

    assert asyncio.run(read()) == [1, 2]


def test_a_new_item_is_offered_at_once_to_a_waiting_reader_and_kept_if_refused() -> None:
    offered: list[int] = []

    def is_even(one: int) -> bool:
        offered.append(one)
        return one % 2 == 0

    async def read() -> list[list[int]]:
        line = NewsQueue[int]()
        line.put(0)  # nobody waits
        found = [await line.take(LATE, is_even)]
        waiting = asyncio.create_task(line.take(LATE, is_even))
        await asyncio.sleep(0)
        for one in (2, 4, 5, 6):  # behind 5, which waits to be taken, 6 has to wait
            line.put(one)
        found.append(await waiting)
        waiting = asyncio.create_task(line.take(LATE))
        await asyncio.sleep(0)
        line.put(8)
        return [*found, await waiting]

    assert asyncio.run(read()) == [[0], [5, 6], [8]]
    assert offered == [2, 4, 5]


def test_an_item_taken_at_once_restarts_the_silence() -> None:
    async def read() -> tuple[list[int], int]:
        line, loop = NewsQueue[int](), asyncio.get_running_loop()
        set_alarms, call_at = [], loop.call_at
        loop.call_at = lambda *told: set_alarms.append(told) or call_at(*told)  # type: ignore
        waiting = asyncio.create_task(line.take(SOON, lambda _: True))
        await asyncio.sleep(0)
        line.put(1)
        return await waiting, len(set_alarms)

    assert asyncio.run(read()) == ([], 2)
