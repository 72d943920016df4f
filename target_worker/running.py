"""A request on the target: its slot, what it has answered, and what it may go on with by itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from outrider.engine.slots import Slot
from outrider.engine.verify import RunAhead, Verdict
from outrider.protocol.messages import Outcome, Prepare, Verify
from outrider.target_worker.colocated import DraftedRounds, Drafting


@dataclass(slots=True)
class Running:
    """A request on this target.

    `answers` are its latest outcomes: the orchestrator may be one behind, when the target went on by itself. `prepared`
    is what it may go on with. `ahead` are its rounds without a word between, of which `ahead_left` are still allowed.
    `eos` are the tokens that end it; `drafting` is the own drafter's part, opened when first asked for.
    """

    slot: Slot
    epoch: int
    answers: deque[Outcome]
    eos: tuple[int, ...] = ()
    prepared: Prepare | None = None
    ahead: RunAhead | DraftedRounds | None = None
    ahead_left: int = 0
    drafting: Drafting | None = None

    @property
    def last(self) -> Outcome:
        return self.answers[-1]

    def onward(self, round_number: int, verdict: Verdict) -> tuple[int, ...] | None:
        """The branch that was prepared for this outcome of this round."""
        prepared = self.prepared
        if prepared is None or (prepared.epoch, prepared.round) != (self.epoch, round_number):
            return None
        return prepared.chain((verdict.accepted, verdict.bonus))

    def prolongs(self, message: Verify) -> bool:
        """Whether it asks for plain rounds to go on where those under way would have ended."""
        return self._is_plain(message) and message.round == self.last.round + self.ahead_left + 1

    def is_under_way(self, message: Verify) -> bool:
        """Whether the plain rounds under way are to make all that it asks for: it was heard before."""
        return self._is_plain(message) and message.round + message.run_ahead <= self.last.round + self.ahead_left

    def _is_plain(self, message: Verify) -> bool:
        """Whether it asks for plain rounds of the text that those under way say, one token a round."""
        return (
            isinstance(self.ahead, RunAhead)
            and (message.chain, message.draft, message.epoch) == ((), 0, self.epoch)
            and message.base_len - message.round == len(self.slot.tokens) - self.last.round - 1
        )

    def stop_ahead(self) -> None:
        """Leaves the slot as if its tokens had come one by one."""
        if self.ahead is not None:
            self.ahead.stop()
            self.ahead = None
