"""A request in a simulated fleet: its text, its progress, and its times as the client sees them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """A request. `text` is the prompt (`prompt` tokens), the answer (`answer` tokens) and a few more.

    In seconds: `sent`; `started`, when it first ran on an engine; `first` and `last`, of its tokens; `gap`, the longest
    wait between two chunks. `received`: tokens at the client. `interruptions`: how often its engine was lost.
    """

    name: str
    session: str
    sent: float
    text: tuple[int, ...]
    prompt: int
    answer: int
    started: float | None = None
    first: float | None = None
    last: float = 0.0
    gap: float = 0.0
    received: float = 0.0
    interruptions: int = 0

    @property
    def is_complete(self) -> bool:
        return self.received >= self.answer

    @property
    def is_resumed(self) -> bool:
        return self.interruptions > 0

    def start(self, now: float) -> None:
        self.started = now if self.started is None else self.started

    def receive(self, tokens: float, now: float, flows: float) -> None:
        """Records a chunk, or the tokens of a flow over `flows` seconds, which has no gaps."""
        if self.first is None:
            self.first = now
        elif not flows:
            self.gap = max(self.gap, now - self.last)
        self.last, self.received = now, self.received + tokens
