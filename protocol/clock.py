"""The one clock of all spans, monotonic nanoseconds that a machine's processes share, and how long one side waits by
it.

The waits are for messages that may be lost (docs/protocol.md, "When a message is lost").
"""

from __future__ import annotations

import time

from outrider.protocol.messages import Span

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000

now = time.monotonic_ns


def since(started_ns: int) -> Span:
    """The span from `started_ns` until now."""
    return Span(started_ns, now())


ASK_AGAIN_NS = 5000 * MILLISECOND_NS
"""The orchestrator: for a request's outcome, until it says VERIFY again."""

FORGET_NS = 300_000 * MILLISECOND_NS
"""A worker with nothing to do for a request: for any word about it, until it closes it by itself."""
