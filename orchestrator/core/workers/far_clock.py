"""The clock of another machine's worker, as this machine would read it.

As NTP does it: a heartbeat tells the worker's time, which lies between the ping and its answer; the answer that came
soonest says it best, and what it said grows old, for clocks drift. Two clocks that may be one are taken for one. A
worker's clock that jumps (its machine slept) is believed at once, and what it said of no time yet ended when it was
heard. Knows no socket.
"""

from __future__ import annotations

from dataclasses import replace

from outrider.protocol.messages import Branches, Drafted, Message, Span

# Two quartz clocks part by less than this share of the time.
DRIFT = 200e-6


class FarClock:
    """One worker's. `round_trip_ns`: from a ping to its answer, of late; 0: none has come."""

    def __init__(self) -> None:
        self.round_trip_ns = 0
        self._ahead_ns = 0
        self._error_ns: int | None = None
        self._at_ns = 0

    def told(self, asked_ns: int, theirs_ns: int, now_ns: int) -> None:
        """Asked at `asked_ns`, heard at `now_ns`, both of this clock, it says that it is `theirs_ns`."""
        self.round_trip_ns = now_ns - asked_ns
        ahead_ns, error_ns = theirs_ns - (asked_ns + now_ns) // 2, self.round_trip_ns // 2 + 1
        known_ns = self._error(now_ns)
        has_jumped = known_ns is not None and abs(ahead_ns - self._ahead_ns) > known_ns + error_ns
        if known_ns is None or error_ns <= known_ns or has_jumped:
            self._ahead_ns, self._error_ns, self._at_ns = ahead_ns, error_ns, now_ns

    def ahead_ns(self, now_ns: int) -> int:
        """How far it is before this one; 0 where they may be the same."""
        error_ns = self._error(now_ns)
        return 0 if error_ns is None or abs(self._ahead_ns) <= error_ns else self._ahead_ns

    def here(self, message: Message, now_ns: int) -> Message:
        """The same word, heard at `now_ns`, with its times on this clock."""
        if not isinstance(message, Branches | Drafted):
            return message
        return replace(message, work=self._moved(message.work, now_ns))

    def _moved(self, work: Span, now_ns: int) -> Span:
        """It has ended by now, whatever the clock or the worker says."""
        lasted_ns = max(work.ended_ns - work.started_ns, 0)
        ended_ns = now_ns if self._error_ns is None else min(work.ended_ns - self.ahead_ns(now_ns), now_ns)
        return Span(max(ended_ns - lasted_ns, 0), max(ended_ns, 0))

    def _error(self, now_ns: int) -> int | None:
        """By how much what is known may be wrong; None: nothing is."""
        return None if self._error_ns is None else self._error_ns + int(DRIFT * (now_ns - self._at_ns))
