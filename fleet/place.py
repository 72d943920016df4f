"""Where an engine is: what the gate is told when it has been given one. Knows addresses and keys; opens no socket."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """An engine's clients come to `endpoint`, whose server has `key`; empty: it asks for none, or a known one.

    `own`: where those of the same `host` (a node of Ray's) may come without keys; empty: nowhere.
    """

    endpoint: str
    key: str = ""
    own: str = ""
    host: str = ""

    def seen_from(self, host: str) -> Place:
        """The shortest way from there."""
        return Place(self.own) if self.own and host == self.host else self
