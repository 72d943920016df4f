"""What the target is told about a request: OPEN, VERIFY, HALT, PREPARE, CLOSE. The drafters are the crew's.

Knows which words a request's state makes; decides nothing and keeps no state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from outrider.orchestrator.core.limits import growth
from outrider.orchestrator.core.request import Request
from outrider.protocol.abilities import Abilities
from outrider.protocol.messages import Close, Halt, Message, Open, Prepare, Verify


class Workers(Protocol):
    """The workers as the rounds need them."""

    @property
    def target_context(self) -> int: ...

    @property
    def target_abilities(self) -> Abilities: ...

    def notes(self) -> list[str]:
        """Why there is less speculation than was asked for."""
        ...

    def is_target(self, name: str) -> bool: ...

    def drafters(self) -> set[str]:
        """Names of the drafters that are ready."""
        ...

    def prefill_workers(self) -> set[str]:
        """Names of those that are ready to read prompts for this target."""
        ...

    def vocabulary(self, name: str) -> int:
        """How many tokens this worker's model has."""
        ...

    def lied(self, name: str, kind: str) -> None:
        """A drafter has said what cannot be, a kind of `door.LIES`; who does so often is not to be heard any more."""
        ...

    def features(self, name: str) -> str:
        """Of what the rows are made that this drafter reads; empty: it reads none."""
        ...

    def model(self, name: str) -> object:
        """What tells drafters that rank outcomes alike from others."""
        ...

    def send_target(self, message: Message) -> None: ...

    def send_drafter(self, name: str, message: Message) -> None: ...

    def let_go(self) -> None:
        """Lets what was sent leave before anything else is done here."""
        ...


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Sends a request's state to the target."""

    workers: Workers

    def open(self, request: Request, offered: bool) -> None:
        """It reads the committed tokens, unless they are `offered` to a prefill worker; its answer is the outcome of an
        empty chain."""
        self.workers.send_target(replace(opening(request, None), offered=offered))

    def verify(self, request: Request) -> None:
        """The request's proposal, in its round."""
        proposal = request.proposal
        self.workers.send_target(
            Verify(
                request=request.id,
                epoch=request.epoch,
                round=request.round,
                base_len=request.base_len,
                chain=proposal.chain,
                kind=proposal.kind(request.admit.sampling),
                q=proposal.q,
                going_on=proposal.going_on,
                draft=proposal.draft,
                drafter=proposal.drafter if proposal.draft else "",
                room=growth(request, self.workers.target_context) if proposal.going_on or proposal.draft else 0,
                parents=proposal.parents,
                least=proposal.least,
            )
        )

    def again(self, request: Request) -> None:
        """The round under way once more: the target answers from what it has said, works on, or says RESYNC."""
        self.verify(request)
        if request.halted:
            self.halt(request)

    def halt(self, request: Request) -> None:
        """The target is not to go on by itself."""
        self.workers.send_target(Halt(request=request.id, epoch=request.epoch))

    def prepare(self, request: Request) -> None:
        """What the target may go on with after the round under way."""
        chains = request.prepared.values()
        self.workers.send_target(
            Prepare(
                request=request.id,
                epoch=request.epoch,
                round=request.round,
                base_len=request.base_len,
                committed=tuple(request.prepared),
                chains=tuple(proposal.chain for proposal in chains),
                parents=tuple(p.parents for p in chains) if any(p.parents for p in chains) else (),
            )
        )

    def close(self, request: Request) -> None:
        self.workers.send_target(Close(request.id))


def opening(request: Request, verifying: tuple[int, ...] | None, ranks: range = range(0), least: float = 1.0) -> Open:
    """The text so far; for a drafter, the outcomes that it is to prepare of what the target verifies."""
    return Open(
        request=request.id,
        epoch=request.epoch,
        round=request.round,
        tokens=np.asarray(request.tokens, np.int32),
        sampling=request.admit.sampling,
        eos=tuple(sorted(request.admit.eos)),
        depth=request.depth,
        branches=len(ranks) or request.branches,
        verifying=verifying,
        generated=request.generated,
        skip=ranks.start,
        features=request.admit.mode != "ar",
        least=least,
    )
