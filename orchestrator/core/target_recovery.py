"""The time without a target: which requests wait for its replacement, in what order they go on, and whose fault it is.

All that were under way go on together. Where the target dies again before one of them has got a token, that one is a
suspect, and on the next replacement suspects are tried one at a time, with nobody else on the target, until their first
token: what fails with other requests is tried alone. Whoever kills the target alone then ends, and the others go on.
Knows requests; what opening one means is the rounds' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.orchestrator.core.request import Request

# Deaths of the target in a row while a request was under way and got no token: it is tried alone, it is given up.
SUSPECT, GUILTY = 2, 3


class TargetRecovery:
    """From the target's death until every request is on its replacement; in between there is none.

    `open_` begins a request on the target and its drafters, from its committed tokens.
    """

    def __init__(self, open_: Callable[[Request], None]) -> None:
        self._open = open_
        self._away = False
        self._trial: Request | None = None
        self._waiting: dict[str, Request] = {}

    def on_target_lost(self, requests: Sequence[Request], why: str) -> list[tuple[Request, str]]:
        """The target has died; `requests` wait from now on. Returns who must end, with the reason."""
        under_way = [request for request in requests if not self.is_waiting(request)]
        self._away, self._trial = True, None
        for request in under_way:
            request.suspend()
            request.add_note(f"the text continued after a pause: {why}")
            request.deaths += 1
            request.metrics.resumed += 1
            self._waiting[request.id] = request
        words = f"{why}, for the third time in a row with this request, the last time with this request alone"
        return [(request, words) for request in under_way if request.deaths >= GUILTY]

    def on_target_found(self) -> None:
        """There is a target again."""
        self._away = False
        self._open_next()

    def admit(self, request: Request) -> None:
        """Opens a new request as soon as it may be on the target."""
        self._waiting[request.id] = request
        self._open_next()

    def is_waiting(self, request: Request) -> bool:
        """Whether it waits."""
        return request.id in self._waiting

    def is_on_trial(self, request: Request) -> bool:
        """Whether this one is tried alone."""
        return request is self._trial

    def clear_suspect(self, request: Request) -> None:
        """It was tried and got its first token; it goes on once all suspects were tried."""
        request.suspend()
        self._trial = None
        self.admit(request)

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._waiting.pop(request.id, None)
        if self.is_on_trial(request):
            self._trial = None
        self._open_next()

    def _open_next(self) -> None:
        """Opens who may be on the target now: a suspect by itself, or all."""
        if self._away or self._trial is not None or not self._waiting:
            return
        self._trial = next((request for request in self._waiting.values() if request.deaths >= SUSPECT), None)
        for request in [self._trial] if self._trial is not None else list(self._waiting.values()):
            del self._waiting[request.id]
            self._open(request)
