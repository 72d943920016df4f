"""What the target and the prefill workers are told about a request. The drafters are the draft pool's.

`Dispatch`: what the target is told about a request: OPEN, VERIFY, HALT, PREPARE, CLOSE. The drafters are the draft
pool's. Knows which words a request's state makes; decides nothing and keeps no state.

`RemotePrefill`: prompts that another process reads in the target's place: to whom they go, and what of them goes on to
the target. The target says first what it has of a prompt; what is left is read elsewhere where that is long enough.
Whatever is lost on the way costs time: the target, asked again, reads on by itself. Knows requests and messages, no
keys or values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from outrider.orchestrator.core.request import Request, remaining_length
from outrider.protocol.messages import (
    Abilities,
    Close,
    Halt,
    Message,
    Open,
    Prefill,
    Prefilled,
    Prepare,
    PromptKv,
    Verify,
)


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

    def record_invalid(self, name: str, kind: str) -> None:
        """Counts an invalid message of a drafter, by its kind (`message_validator.INVALID`); many disconnect it."""
        ...

    def features(self, name: str) -> str:
        """Of what the rows are made that this drafter reads; empty: it reads none."""
        ...

    def model(self, name: str) -> object:
        """What tells drafters that rank outcomes alike from others."""
        ...

    def send_target(self, message: Message) -> None: ...

    def send_worker(self, name: str, message: Message) -> None: ...

    def flush_and_yield(self) -> None:
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
                autonomous=proposal.autonomous,
                draft=proposal.draft,
                drafter=proposal.drafter if proposal.draft else "",
                max_tokens=remaining_length(request, self.workers.target_context)
                if proposal.autonomous or proposal.draft
                else 0,
                parents=proposal.parents,
                min_prob=proposal.min_prob,
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


def opening(
    request: Request, verifying: tuple[int, ...] | None, ranks: range = range(0), min_prob: float = 1.0
) -> Open:
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
        rank_offset=ranks.start,
        features=request.admit.mode != "ar",
        min_prob=min_prob,
    )


@dataclass(slots=True)
class RemotePrefill:
    """A prompt in its `epoch` that was offered, or is read by `worker`; so many tokens are `left`."""

    epoch: int
    left: int
    worker: str = ""


class RemotePrefills:
    """The readings under way, by request. `min_tokens`: shorter prompts are the target's own matter."""

    def __init__(self, workers: Workers, dispatch: Dispatch, min_tokens: int) -> None:
        self._workers = workers
        self._dispatch = dispatch
        self._min_tokens = min_tokens
        self._prefills: dict[str, RemotePrefill] = {}
        self._asked: set[str] = set()

    def offer(self, request: Request) -> bool:
        """Whether the target is to wait, before it reads, for what becomes of this prompt."""
        self.forget(request)
        left = len(request.tokens) - 1
        if left < self._min_tokens or not self._workers.prefill_workers():
            return False
        self._prefills[request.id] = RemotePrefill(request.epoch, left)
        return True

    def on_progress(self, request: Request, message: Prefilled) -> None:
        """The target has so much of a prompt: the rest is given to who has the least to read, or left to the target."""
        reading = self._prefills.get(request.id)
        if reading is None or reading.epoch != message.epoch:
            return
        reading.left = message.total - 1 - message.done
        if reading.worker or reading.left <= 0:
            return
        workers = self._workers.prefill_workers()
        if reading.left < self._min_tokens or not workers:
            self._hand_back(request)
            return
        reading.worker = min(sorted(workers), key=self._load)
        self._asked.add(reading.worker)
        tokens = np.asarray(request.tokens, np.int32)
        self._workers.send_worker(reading.worker, Prefill(request.id, request.epoch, tokens, message.done))

    def has_asked(self, worker: str) -> bool:
        """Whether this is a prefill worker whose words come here."""
        return worker in self._asked

    def on_message(self, request: Request | None, sender: str, message: Message) -> bool:
        """Takes what a prefill worker says; False: it is of no use any more."""
        reading = self._prefills.get(request.id) if request is not None else None
        if request is None or reading is None or reading.worker != sender:
            return False
        if isinstance(message, PromptKv):
            if message.epoch != reading.epoch:
                return False
            request.metrics.handed_over += message.count
            self._workers.send_target(message)
        else:
            self._hand_back(request)
        return True

    def on_worker_lost(self, worker: str, requests: Mapping[str, Request]) -> None:
        """It reads no more: the target does."""
        self._asked.discard(worker)
        for id_ in [id_ for id_, reading in self._prefills.items() if reading.worker == worker]:
            self._hand_back(requests[id_])

    def forget(self, request: Request) -> None:
        """Nothing more is wanted of it: it has been read, or the target reads it, or nobody needs it."""
        reading = self._prefills.pop(request.id, None)
        if reading is not None and reading.worker:
            self._workers.send_worker(reading.worker, Close(request.id))

    def _hand_back(self, request: Request) -> None:
        """The target reads on by itself."""
        self.forget(request)
        self._dispatch.again(request)

    def _load(self, worker: str) -> int:
        return sum(reading.left for reading in self._prefills.values() if reading.worker == worker)
