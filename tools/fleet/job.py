"""A request on its way through a fleet: what it asks, where it has come to, and what its reader saw."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """`text` is its prompt and, behind the first `prompt` tokens, what will be said: `answer` of them.

    Seconds: `asked`; `begun` where it ran first; `first` and `last` token; `gap` the longest wait between two chunks.
    `on_hidden_states`: tokens that the reader has. `broken`: how often its engine was lost under it.
    """

    name: str
    session: str
    asked: float
    text: tuple[int, ...]
    prompt: int
    answer: int
    begun: float | None = None
    first: float | None = None
    last: float = 0.0
    gap: float = 0.0
    on_hidden_states: float = 0.0
    broken: int = 0

    @property
    def is_over(self) -> bool:
        return self.on_hidden_states >= self.answer

    @property
    def is_resumed(self) -> bool:
        return self.broken > 0

    def begins(self, now: float) -> None:
        self.begun = now if self.begun is None else self.begun

    def wants(self, tokens: float, now: float, flows: float) -> None:
        """A chunk has come, or what flowed for so many seconds, which says nothing of gaps."""
        if self.first is None:
            self.first = now
        elif not flows:
            self.gap = max(self.gap, now - self.last)
        self.last, self.on_hidden_states = now, self.on_hidden_states + tokens
