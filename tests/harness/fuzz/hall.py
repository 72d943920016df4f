"""What every socket under fire is to its program: take this frame, come to rest, tell what was seen."""

from __future__ import annotations

from typing import Protocol

from outrider.orchestrator.limits import Rate
from tests.harness.fuzz.mutation import Frames

ENDLESS = Rate(1e12, 1e12)
"""In place of what a peer may say: here everything is to be read."""


class Broken(Exception):
    """Something that frames may not do has been done by some."""


class Hall(Protocol):
    """A socket with everything behind it, and honest company whose requests are under way."""

    def fire(self) -> None:
        """One more broken frame arrives, or a few that belong together."""
        ...

    def rest(self) -> None:
        """All that arrived is handled, and the honest get on. Raises Broken where they don't."""
        ...

    def told(self) -> str:
        """How it went, in a line."""
        ...

    def close(self) -> None: ...


__all__ = ["ENDLESS", "Broken", "Frames", "Hall"]
