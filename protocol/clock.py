"""The one clock of all spans: monotonic nanoseconds, shared by the processes of a machine."""

from __future__ import annotations

import time

from outrider.protocol.messages import Span

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000

now = time.monotonic_ns


def since(started_ns: int) -> Span:
    """The span from `started_ns` until now."""
    return Span(started_ns, now())
