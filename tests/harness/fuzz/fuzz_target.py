"""The interface of every fuzzed socket: send a frame, settle, report."""

from __future__ import annotations

from typing import Protocol

from outrider.orchestrator.sockets import Rate

ENDLESS = Rate(1e12, 1e12)
"""Replaces the rate limit of a peer, so that everything is read."""


class FuzzFailure(Exception):
    """Frames have caused a failure."""


class FuzzTarget(Protocol):
    """A socket with its process, and honest peers with requests in progress."""

    def send_broken(self) -> None:
        """Sends a broken frame, or a few that belong together."""
        ...

    def settle(self) -> None:
        """Handles all that arrived, and checks that honest requests progress. Raises FuzzFailure if they do not."""
        ...

    def summary(self) -> str:
        """Returns a line about the run so far."""
        ...

    def close(self) -> None: ...
