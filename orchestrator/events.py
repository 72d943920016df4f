"""What the orchestrator's two threads say to each other (in one process, so plain objects on a queue).

The *core* thread owns the workers' socket and the rounds; it deals in tokens. The *front* thread owns the clients'
socket, tokenizers, text and the queue of waiting requests; it deals in text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.orchestrator.kv_room import KvRoom
from outrider.protocol.heads import DRAFT_MODEL, JOINT
from outrider.protocol.logprobs import Logprobs, joined
from outrider.protocol.messages import RoundRecord, Timings, WorkerStats
from outrider.protocol.origins import Origin
from outrider.protocol.sampling import SamplingParams

# --- front -> core ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admit:
    """Run this request now. `sampling.seed` is drawn already; `mode` is ar, sd, ssd or auto; `eos` is empty when
    ignored.

    `num_draft_tokens` and `branches` None: nobody has named any, neither client nor server. `origins`, `rounds`:
    tell them. `said`: the text's first tokens, which another server has made. `drafter`: the only one to draft, if it
    is named. `code`: its prompt looks like a program.
    """

    request: str
    tokens: tuple[int, ...]
    sampling: SamplingParams
    mode: str
    eos: frozenset[int]
    num_draft_tokens: int | None = None
    branches: int | None = None
    origins: bool = False
    rounds: bool = False
    said: tuple[int, ...] = ()
    drafter: str = ""
    code: bool = False

    @property
    def takes_workers(self) -> bool:
        """Whether draft workers may draft for it."""
        return self.mode != "ar" and (not self.drafter or DRAFT_MODEL in self.drafter.split(JOINT))


@dataclass(frozen=True, slots=True)
class Stop:
    """End this request now: `reason` is stop (a stop string was found) or cancelled."""

    request: str
    reason: str


@dataclass(frozen=True, slots=True)
class Speaks:
    """The cluster's `model` means by its tokens what this digest says (`pair.vocabulary`); drafters have to, too."""

    model: str
    vocabulary: str


@dataclass(frozen=True, slots=True)
class Quit:
    """End the core thread: close every request, tell the workers to shut down."""


# --- core -> front ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """A worker became ready, was lost, or reported a stage of its start. `kv_room`: what texts may take in them all."""

    workers: tuple[WorkerStats, ...]
    ready: bool
    stage: str = ""
    fatal: str = ""
    notes: tuple[str, ...] = ()
    kv_room: KvRoom | None = None


@dataclass(frozen=True, slots=True)
class Began:
    """The request runs in `mode`; `notes` give the reason whenever speculation is off."""

    request: str
    mode: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefillAt:
    request: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Committed:
    """These tokens are final, EOS included if it ended the text.

    `logprobs` and `origins` are theirs, `rounds` those that brought them, if asked for.
    """

    request: str
    tokens: tuple[int, ...]
    logprobs: Logprobs | None = None
    origins: tuple[Origin, ...] | None = None
    rounds: tuple[RoundRecord, ...] | None = None

    def and_then(self, later: Committed) -> Committed:
        """Both in one."""
        told = [one.logprobs for one in (self, later) if one.logprobs is not None]
        origins = None if self.origins is None else self.origins + (later.origins or ())
        rounds = None if self.rounds is None else self.rounds + (later.rounds or ())
        return Committed(self.request, self.tokens + later.tokens, joined(told) if told else None, origins, rounds)


@dataclass(frozen=True, slots=True)
class Ended:
    """`reason` is eos, stop, length or cancelled. `until(n)`: the timings of the first n tokens, when no more of them
    count."""

    request: str
    reason: str
    timings: Timings
    notes: tuple[str, ...] = ()
    until: Callable[[int], Timings] | None = None


@dataclass(frozen=True, slots=True)
class Broke:
    """The request ended badly; `kind` names a class of protocol.errors."""

    request: str
    kind: str
    message: str


ToCore = Admit | Stop | Speaks | Quit
ToFront = WorkersChanged | Began | PrefillAt | Committed | Ended | Broke


def together(events: Iterable[ToFront]) -> list[ToFront]:
    """The same, but tokens of a request with nothing else of it between them are one event: who is late tells them at
    once."""
    found: list[ToFront] = []
    latest: dict[str, int] = {}
    for event in events:
        match event:
            case Committed():
                at = latest.setdefault(event.request, len(found))
                before = found[at : at + 1]
                if before and isinstance(before[0], Committed):
                    found[at] = before[0].and_then(event)
                    continue
            case Began() | PrefillAt() | Ended() | Broke():
                latest.pop(event.request, None)
        found.append(event)
    return found
