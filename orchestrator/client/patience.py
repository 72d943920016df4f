"""How long a client waits for a server that says nothing: no socket in here."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

from outrider.protocol.errors import EndpointError
from outrider.protocol.keys import ClientKeys
from outrider.protocol.knock import knock, require_server
from outrider.protocol.messages import StatsQuery

ASK_AFTER_SECONDS = 1.0


class Patience:
    """Tells a server that is busy from one that is gone: asks after some silence, gives up `seconds` after that.

    Raises:
        EndpointError: nobody serves the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        seconds: float,
        alive: Callable[[], None] | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._seconds = seconds
        self._alive = alive
        self.heard()
        self._look()

    @property
    def poll_ms(self) -> int:
        """How long to wait for something to arrive before `silent` is called."""
        return max(int(1000 * min(ASK_AFTER_SECONDS, self._seconds / 2)), 1)

    def heard(self) -> None:
        """Something arrived."""
        self._asked = 0

    def silent(self, about: str | None = None) -> StatsQuery:
        """Nothing arrived for `poll_ms`; what to ask, `about` a request that should be there.

        Raises:
            EndpointError: nobody serves the endpoint any more, or a question was not answered for too long.
            KeyFault: it is served, but not to this side's key.
            OutriderError: `alive` knows that the server ended.
        """
        self._look()
        if self._asked == 1 and self._endpoint.startswith("tcp:"):
            with suppress(EndpointError):  # it may only be stopped; what is left unanswered is counted below
                knock(self._endpoint, self._keys)
        self._asked += 1  # counted, not timed: who is stopped asks nothing, and nobody owes it an answer
        if (self._asked - 1) * self.poll_ms > 1000 * self._seconds:
            raise EndpointError(
                f"nothing answers at {self._endpoint} for {self._seconds:g} s; expected a running `outrider serve`"
            )
        return StatsQuery(f"s{os.urandom(8).hex()}", about)

    def _look(self) -> None:
        if self._alive is not None:
            self._alive()
        require_server(self._endpoint)
