"""The interface of every fuzzed socket: send a frame, come to rest, report."""

from __future__ import annotations

from typing import Protocol

from outrider.orchestrator.sockets import Rate
from tests.harness.fuzz.mutation import Frames

ENDLESS = Rate(1e12, 1e12)
"""Replaces the rate limit of a peer, so that everything is read."""


class Broken(Exception):
    """Frames have caused a failure."""


class Hall(Protocol):
    """A socket with its process, and honest peers with requests in progress."""

    def fire(self) -> None:
        """Sends a broken frame, or a few that belong together."""
        ...

    def rest(self) -> None:
        """Handles all that arrived, and checks that honest requests progress. Raises Broken if they do not."""
        ...

    def told(self) -> str:
        """Returns a line about the run so far."""
        ...

    def close(self) -> None: ...


__all__ = ["ENDLESS", "Broken", "Frames", "Hall"]
