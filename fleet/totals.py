"""What all engines of a fleet do, as one server would tell it. Adds up; asks who it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from outrider.orchestrator.client.async_client import AsyncClient
from outrider.orchestrator.front.totals import add, by_name, each
from outrider.protocol.errors import EndpointError
from outrider.protocol.kv import KvUse
from outrider.protocol.messages import Stats
from outrider.protocol.tallies import Durations


async def together(engines: Sequence[AsyncClient]) -> Stats:
    """The sum of those that answer.

    Raises:
        EndpointError: none does.
    """
    told = await asyncio.gather(*(engine.stats() for engine in engines), return_exceptions=True)
    found = [_named(one, str(number)) for number, one in enumerate(told) if isinstance(one, Stats)]
    if not found:
        raise EndpointError("no engine of the fleet answers; try again later")
    return reduce(_sum, found)


def _named(stats: Stats, number: str) -> Stats:
    """Workers of several engines have the same names."""
    return replace(stats, workers=tuple(replace(one, name=f"{number}/{one.name}") for one in stats.workers))


def _sum(left: Stats, right: Stats) -> Stats:
    kv = KvUse(left.kv.limit + right.kv.limit, left.kv.used + right.kv.used, left.kv.reserved + right.kv.reserved)
    return Stats(
        request=left.request,
        version=left.version,
        workers=(*left.workers, *right.workers),
        active=left.active + right.active,
        queued=left.queued + right.queued,
        finished=left.finished + right.finished,
        failed=left.failed + right.failed,
        totals=add(left.totals, right.totals),
        stale_messages=left.stale_messages + right.stale_messages,
        rejected_frames=left.rejected_frames + right.rejected_frames,
        generated=left.generated + right.generated,
        endings=by_name(left.endings, right.endings),
        kv=kv,
        round_seconds=_both(left.round_seconds, right.round_seconds),
        verify_seconds=_both(left.verify_seconds, right.verify_seconds),
        dropped_branches=left.dropped_branches + right.dropped_branches,
    )


def _both(left: Durations, right: Durations) -> Durations:
    return Durations(left.bounds or right.bounds, each(left.counts, right.counts), left.seconds + right.seconds)
