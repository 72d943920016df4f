"""The target's forwards on a simulated machine."""

from __future__ import annotations

from outrider.protocol.clock import SECOND_NS
from outrider.target_worker.model_runner import InFlightForward, ModelRunner, Output, count_rows
from tools.simulation.pace import Pace


class PacedRunner(ModelRunner):
    """A `ModelRunner` whose forwards end when `pace` says.

    A forward begins when the one before it ends, or, if a VERIFY asked for it, when that was read. A profile does not
    describe how prompts are read, so forwards that only read prompts take the time they take.
    """

    def __init__(self, pace: Pace) -> None:
        super().__init__()
        self._pace = pace

    def commit(self, flight: InFlightForward) -> list[Output]:
        rounds = any(member.answers for member in flight.members)
        was_asked = any(member.answers and member.answers[-1].next_proposal is None for member in flight.members)
        outputs = super().commit(flight)
        if rounds:
            rows = count_rows(flight.parts)
            self._pace.end(rows, (flight.begun_ns if was_asked else self._ended_ns) / SECOND_NS)
            self._pace.wait()
        return outputs
