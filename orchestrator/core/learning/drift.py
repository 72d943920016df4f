"""Whether a drafter in the target's process is still of use to a request: one that says nothing, or nothing that holds,
is left out of it.

Counts only; `auto` has left it long before, since it measures what rounds bring.
"""

from __future__ import annotations

from dataclasses import dataclass

# So many rounds in a row without a token where some were asked for.
SILENT_ROUNDS = 4
# Of so many tokens less than this share held.
TOKENS, LEAST = 128, 0.02


@dataclass(slots=True)
class Drift:
    """Of one drafter in one request."""

    silent: int = 0
    drafted: int = 0
    held: int = 0

    def saw(self, drafted: int, held: int) -> str:
        """A chain of so many tokens that was asked for; why the drafter is of no use any more, if it is not."""
        self.silent = 0 if drafted else self.silent + 1
        self.drafted, self.held = self.drafted + drafted, self.held + held
        if self.silent >= SILENT_ROUNDS:
            return f"it proposed nothing in {self.silent} rounds"
        if self.drafted >= TOKENS:
            if self.held < LEAST * self.drafted:
                return f"{self.held} of its last {self.drafted} tokens were accepted"
            self.drafted, self.held = self.drafted // 2, self.held // 2
        return ""
