"""How long one side waits for a word before it takes it for lost (docs/protocol.md, "When a message is lost")."""

from __future__ import annotations

from outrider.protocol.clock import MILLISECOND_NS

ASK_AGAIN_NS = 5000 * MILLISECOND_NS
"""The orchestrator: for a request's outcome, until it says VERIFY again."""

FORGET_NS = 300_000 * MILLISECOND_NS
"""A worker with nothing to do for a request: for any word about it, until it closes it by itself."""
