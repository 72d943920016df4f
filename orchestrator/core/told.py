"""What each drafter was told of each request: the rounds that its words may be about.

Every word of an honest drafter answers an OPEN or a COMMIT that it was sent, however late it comes. Bounded: the latest
rounds of a request; of the latest requests that have ended, who was told of them. Knows messages; judges nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from outrider.protocol.messages import Commit, Open

# Who still works for a request after which so many others have ended was given up long ago.
MOST_OVER = 2048
MOST_ROUNDS = 8

Place = tuple[int, int]
"""Epoch and round."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a drafter was to do in a round: prepare `branches` outcomes of the chain `verifying`, `depth` tokens each,
    or, with None, continue the text; after `base_len` committed tokens. `beside`: it may tell others beside a chain's.
    """

    base_len: int
    verifying: tuple[int, ...] | None
    depth: int
    branches: int
    beside: bool = False


@dataclass(slots=True)
class Tasks:
    """Those of one request, by epoch and round; the oldest are forgotten."""

    latest: Place = (0, 0)
    at: OrderedDict[Place, tuple[Task, ...]] = field(default_factory=OrderedDict)

    def add(self, place: Place, task: Task) -> None:
        known = self.at.get(place, ())
        if task not in known:
            self.at[place] = (*known[-MOST_ROUNDS:], task)
        self.latest = max(self.latest, place)
        if len(self.at) > MOST_ROUNDS:
            self.at.popitem(last=False)

    def is_past(self, place: Place) -> bool:
        """Whether what was told there may be forgotten by now."""
        return place < min(self.at)


class Told:
    """Of all drafters, by name."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[str, Tasks]] = {}
        self._over: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def note(self, drafter: str, message: Open | Commit) -> None:
        """It is sent this."""
        base_len = len(message.tokens) if isinstance(message, Open) else message.base_len
        tasks = self._tasks.setdefault(drafter, {}).setdefault(message.request, Tasks())
        task = Task(base_len, message.verifying, message.depth, message.branches, message.least < 1.0)
        tasks.add((message.epoch, message.round), task)

    def over(self, request: str) -> None:
        """It has ended: whatever is still said of it is late."""
        told = [drafter for drafter, requests in self._tasks.items() if requests.pop(request, None) is not None]
        self._over[request] = tuple(told)
        if len(self._over) > MOST_OVER:
            self._over.popitem(last=False)

    def tasks(self, drafter: str, request: str) -> Tasks | None:
        """What it was told of this request, which runs; None: nothing."""
        return self._tasks.get(drafter, {}).get(request)

    def is_over(self, drafter: str, request: str) -> bool:
        """Whether this is a request that has ended, and of which it was told."""
        return drafter in self._over.get(request, ())
