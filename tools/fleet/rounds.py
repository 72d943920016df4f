"""Generates an engine's tokens by the real rounds, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.orchestrator.events import Admit, Committed, RequestEnded, ToFront
from outrider.orchestrator.settings import MAX_DRAFTERS
from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import Failed
from outrider.protocol.sampling import SamplingParams
from tests.harness.settings import round_settings
from tests.harness.virtual.drafter import Machine
from tests.harness.virtual.engine import Hardware, VirtualEngine
from tests.harness.virtual.event_loop import EventLoop
from tools.fleet.job import Job
from tools.fleet.plan import Fleet
from tools.simulation.profile import Profile


class OnTokens(Protocol):
    """Receives the tokens of a request: a chunk, or a flow over `flows` seconds."""

    def __call__(self, job: Job, tokens: float, flows: float = 0.0) -> None: ...


def hardware(fleet: Fleet, profile: Profile) -> Hardware:
    """Returns the hardware of one engine of the fleet with its drafters."""
    other = Machine(profile, fleet.hop_ms / 1000)
    prompt_ms = 1000 / fleet.prompt_rate if fleet.prompt_rate else 0.0
    others = (other,) * (fleet.drafters - 1)
    return Hardware(profile, fleet.hop_ms, others=others, prompt_ms=prompt_ms, cache_tokens=fleet.remembers)


class RealRounds:
    """Runs the real rounds. Calls `on_tokens` with each chunk, and `on_complete` with each request that ends."""

    def __init__(
        self, loop: EventLoop, fleet: Fleet, profile: Profile, on_tokens: OnTokens, on_complete: Callable[[Job], None],
        memory: Sequence[Tuning] = (),
    ) -> None:  # fmt: skip
        started = min(fleet.drafters, MAX_DRAFTERS)  # others join
        settings = round_settings(fleet.depth, fleet.branches, ngrams=False, drafters=started)
        self._engine = VirtualEngine(loop, hardware(fleet, profile), settings, self._on_event, memory=memory)
        self._mode, self._on_tokens, self._on_complete = fleet.mode, on_tokens, on_complete
        self._jobs: dict[str, Job] = {}

    @property
    def busy(self) -> float:
        return self._engine.target.busy

    @property
    def forwards(self) -> int:
        return self._engine.target.forwards

    @property
    def rows(self) -> int:
        return self._engine.target.rows

    def learned(self) -> tuple[Tuning, ...]:
        return self._engine.rounds.learned()

    def begin(self, job: Job) -> None:
        received = job.text[job.prompt : job.prompt + round(job.received)]
        name = f"{job.name}.{job.interruptions}"
        self._jobs[name] = job
        sampling = SamplingParams(max_tokens=job.answer, ignore_eos=True)
        admit = Admit(name, job.text[: job.prompt], sampling, self._mode, frozenset(), resume_tokens=received)
        self._engine.begin(admit, job.text)

    def end(self) -> None:
        self._engine.end()

    def lose_drafters(self, count: int, noticed: float) -> None:
        self._engine.lose_drafters(count, noticed)

    def regain_drafters(self) -> None:
        self._engine.regain_drafters()

    def _on_event(self, event: ToFront) -> None:
        match event:
            case Committed(request=request, tokens=tokens):
                self._on_committed(self._jobs[request], tokens)
            case RequestEnded(request=request):
                self._engine.forget(request)
                self._on_complete(self._jobs.pop(request))
            case Failed(message=message):
                raise WorkerError(f"a simulated request failed: {message}")

    def _on_committed(self, job: Job, tokens: Sequence[int]) -> None:
        place = job.prompt + round(job.received)
        if tuple(tokens) != job.text[place : place + len(tokens)]:
            raise WorkerError(f"the tokens of {job.name} differ from its text from token {place} on")
        self._on_tokens(job, len(tokens))
