"""The clock of all spans (monotonic nanoseconds, the same in all processes of a machine), and two timeouts.

The timeouts are for messages that may be lost (docs/protocol.md, "When a message is lost").
"""

from __future__ import annotations

import time

MILLISECOND_NS = 1_000_000
SECOND_NS = 1_000_000_000

now = time.monotonic_ns

OUTCOME_TIMEOUT_NS = 5000 * MILLISECOND_NS
"""How long the orchestrator waits for a request's OUTCOME before it sends VERIFY again."""

IDLE_REQUEST_TIMEOUT_NS = 300_000 * MILLISECOND_NS
"""How long a worker waits for any message about an idle request before it closes the request."""
