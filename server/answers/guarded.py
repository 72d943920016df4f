"""A stream that fails says so in an event of its own API and ends; its status has been sent long before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from outrider.protocol.errors import OutriderError
from outrider.server.problems import Problem, Refused, problem_of


async def guarded(events: AsyncIterator[bytes], tell: Callable[[Problem], bytes]) -> AsyncIterator[bytes]:
    """`events`, and where they end with an error, that error as `tell` writes it."""
    try:
        async for data in events:
            yield data
    except (OutriderError, Refused) as error:
        yield tell(problem_of(error))
    except Exception as error:
        yield tell(problem_of(error))
        raise
