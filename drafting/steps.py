"""Work on a tree, cut where it waits for a forward, so that several requests' can share one (`drafting.together`)."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from outrider.drafting.drafter import TreeFeed

Result = TypeVar("Result")
Steps = Generator[TreeFeed, list[int], Result]
"""Yields what its tree is to be fed, and is sent the new nodes."""
