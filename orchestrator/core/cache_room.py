"""How many bytes the branches of all requests may take, and of each: what is over is not kept, and counted.

An honest drafter's branches take kilobytes. The bounds are for one that sends as much as a frame holds.
"""

from __future__ import annotations

from dataclasses import dataclass

A_REQUEST, IN_ALL = 16 << 20, 64 << 20
"""Bytes."""


@dataclass(slots=True)
class CacheRoom:
    """What is held of it, and how many messages found no place."""

    held: int = 0
    dropped: int = 0

    def takes(self, size: int, of_request: int) -> bool:
        """Whether `size` bytes more may be held, for a request that has `of_request`; then they are."""
        if of_request + size > A_REQUEST or self.held + size > IN_ALL:
            self.dropped += 1
            return False
        self.held += size
        return True

    def give_back(self, size: int) -> None:
        self.held -= size
