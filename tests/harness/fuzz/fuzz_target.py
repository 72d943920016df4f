"""The interface of every fuzzed socket: send a frame, settle, report."""

from __future__ import annotations

from typing import Protocol

from outrider.orchestrator.sockets import Rate

UNLIMITED_RATE = Rate(1e12, 1e12)
"""Replaces the rate limit of a peer, so that no frame is dropped because of it."""


class FuzzFailure(Exception):
    """Invalid frames have caused a failure."""


class FuzzTarget(Protocol):
    """A fuzzed socket, the code behind it, and correct peers with requests in progress."""

    def send_broken(self) -> None:
        """Sends an invalid message of one or a few frames."""
        ...

    def settle(self) -> None:
        """Handles all messages that have arrived, and checks that correct requests progress. Raises FuzzFailure."""
        ...

    def summary(self) -> str:
        """Returns a line about the run so far."""
        ...

    def close(self) -> None: ...
