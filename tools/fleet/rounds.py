"""An engine's tokens by the real rounds, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.orchestrator.core.policy.tuning import Tuning
from outrider.orchestrator.core.request import RoundSettings
from outrider.orchestrator.events import Admit, Committed, RequestEnded, RequestFailed, ToFront
from outrider.protocol.errors import WorkerError
from outrider.protocol.profile import Profile
from outrider.protocol.sampling import SamplingParams
from tests.harness.virtual.drafter import Machine
from tests.harness.virtual.engine import Hardware, VirtualEngine
from tests.harness.virtual.world import World
from tools.fleet.job import Job
from tools.fleet.plan import Fleet


class Hear(Protocol):
    """`flows`: no chunk, but what came in so many seconds."""

    def __call__(self, job: Job, tokens: float, flows: float = 0.0) -> None: ...


def hardware(fleet: Fleet, profile: Profile) -> Hardware:
    """One engine of the fleet, with its drafters."""
    other = Machine(profile, fleet.hop_ms / 1000)
    prompt_ms = 1000 / fleet.prompt_rate if fleet.prompt_rate else 0.0
    others = (other,) * (fleet.drafters - 1)
    return Hardware(profile, fleet.hop_ms, others=others, prompt_ms=prompt_ms, remembers=fleet.remembers)


class RealRounds:
    """`hear` is told each job's tokens as they come, `over` that it is complete."""

    def __init__(
        self, world: World, fleet: Fleet, profile: Profile, hear: Hear, over: Callable[[Job], None],
        memory: Sequence[Tuning] = (),
    ) -> None:  # fmt: skip
        settings = RoundSettings(fleet.depth, fleet.branches, ngrams=False, drafters=fleet.drafters)
        self._engine = VirtualEngine(world, hardware(fleet, profile), settings, self._told, memory=memory)
        self._mode, self._hear, self._over = fleet.mode, hear, over
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
        said = job.text[job.prompt : job.prompt + round(job.on_hidden_states)]
        name = f"{job.name}.{job.broken}"
        self._jobs[name] = job
        sampling = SamplingParams(max_tokens=job.answer, ignore_eos=True)
        admit = Admit(name, job.text[: job.prompt], sampling, self._mode, frozenset(), resume_tokens=said)
        self._engine.begin(admit, job.text)

    def end(self) -> None:
        self._engine.end()

    def lose_drafters(self, count: int, noticed: float) -> None:
        self._engine.lose_drafters(count, noticed)

    def regain_drafters(self) -> None:
        self._engine.regain_drafters()

    def _told(self, event: ToFront) -> None:
        match event:
            case Committed(request=request, tokens=tokens):
                self._heard(self._jobs[request], tokens)
            case RequestEnded(request=request):
                self._engine.forget(request)
                self._over(self._jobs.pop(request))
            case RequestFailed(message=message):
                raise WorkerError(f"a simulated request broke: {message}")

    def _heard(self, job: Job, tokens: Sequence[int]) -> None:
        place = job.prompt + round(job.on_hidden_states)
        if tuple(tokens) != job.text[place : place + len(tokens)]:
            raise WorkerError(f"{job.name} does not say what its text says from token {place} on")
        self._hear(job, len(tokens))
