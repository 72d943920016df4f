"""The clock of all spans, monotonic nanoseconds that are the same in all processes of a machine, and two timeouts.

The timeouts are for messages that may be lost (docs/protocol.md, "When a message is lost").
"""

from __future__ import annotations

import time

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000

now = time.monotonic_ns

ASK_AGAIN_NS = 5000 * MILLISECOND_NS
"""How long the orchestrator waits for a request's OUTCOME before it sends VERIFY again."""

FORGET_NS = 300_000 * MILLISECOND_NS
"""How long a worker with nothing to do for a request waits for any message about it before it closes the request."""
