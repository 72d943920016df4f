"""What is known of one drafter in the target's process: how well its chains hold, and what drafting them takes.

Beliefs until it has drafted are from its trial at load. Knows numbers only.
"""

from __future__ import annotations

from outrider.orchestrator.core.learning.acceptance import PRIOR_ACCEPTANCE, Acceptance
from outrider.orchestrator.core.learning.averages import Average
from outrider.protocol.abilities import OwnDrafter

# A drafter's token takes at least so much of a target's step, however small it is.
LEAST_WEIGHT = 0.05


class OwnDrafts:
    """`drafted`: how well its tokens hold. `is_head`: it reads the target."""

    def __init__(self, told: OwnDrafter) -> None:
        self.name, self.is_head = told.name, told.is_head
        self.drafted = Acceptance(told.agreement if told.agreement >= 0 else PRIOR_ACCEPTANCE)
        self._weight = max(told.weight, LEAST_WEIGHT)
        self._step_ms = Average()

    def saw(self, tokens: int, accepted: int, milliseconds: float) -> None:
        """A chain of so many tokens, drafted together with those of who else drafted then."""
        self.drafted.add(tokens, accepted)
        self._step_ms.add(milliseconds / max(tokens, 1))

    def start_from(self, step_ms: float, acceptance: tuple[float, ...]) -> None:
        """Takes earlier measurements for first values."""
        self._step_ms.add(step_ms)
        self.drafted.start_from(acceptance)

    @property
    def is_known(self) -> bool:
        """Whether it has drafted."""
        return self._step_ms.value is not None

    def step_ms(self, forward_ms: float) -> float:
        """A token of a chain; by its trial, where it has not drafted yet and a step of the target takes so long."""
        return self._step_ms.value if self._step_ms.value is not None else self._weight * forward_ms
