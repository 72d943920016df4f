"""A cluster in one thread, without sockets or models: the real scheduler and draft workers, and an oracle target.

Messages pass through the real codec. A test decides when they are delivered and which are lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from msgspec import structs

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import Admit, Committed, RequestEnded, ToFront
from outrider.protocol.messages import (
    Abilities,
    Autonomous,
    Close,
    DraftTokens,
    Halt,
    Message,
    Open,
    Outcome,
    Prepare,
    Resync,
    RoundRecord,
    Span,
    Verify,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Origin
from tests.fake_workers import FakeWorkers
from tests.harness.settings import round_settings
from tests.harness.virtual.known_text import accepted_nodes, outcome_path
from tests.system.links import FakeLink, Idle, codec_round_trip
from tools.simulation.replay import ReplayDrafter, Script

GREEDY = SamplingParams()
TURN_NS = 10_000_000


class OracleTarget:
    """Verifies against a known text."""

    def __init__(self, text: tuple[int, ...], context: int = 1 << 20) -> None:
        self.text = text
        self.context = context
        self.verified: list[Verify] = []
        self.autonomous: Verify | None = None
        self.plain: Verify | None = None
        self.now_ns = TURN_NS
        self._ended_ns = 0
        self._halted = False
        self._prepared: Prepare | None = None
        self._eos: tuple[int, ...] = ()

    def answer(self, message: Message) -> list[Message]:
        match message:
            case Open():
                at, self._eos = len(message.tokens), message.eos
                return [Outcome(message.request, message.epoch, message.round, at, 0, self.text[at], Span(0, 1))]
            case Prepare():
                self._prepared = message
            case Verify(autonomous=False):
                self.verified.append(message)
                return self._next_proposal(message)
            case Verify():
                self.verified.append(message)
                self.plain = message
            case Halt():
                self._halted = True
            case Close():
                self.plain = None
        return []

    def step(self) -> Message | None:
        """Returns the outcome of the next round of plain decoding, or None if the target waits for a message."""
        plain = self.plain
        if plain is None:
            return None
        assert isinstance(plain.proposal, Autonomous)
        more = plain.proposal.max_tokens > 1 and not self._halted
        rest = Autonomous(plain.proposal.max_tokens - 1)
        following = structs.replace(plain, round=plain.round + 1, base_len=plain.base_len + 1, proposal=rest)
        self.plain, self._halted = following if more else None, False
        return structs.replace(self._outcome(plain), next_proposal=DraftTokens() if more else None)

    def _next_proposal(self, message: Verify) -> list[Message]:
        """Returns the outcome. Like the target worker, continues with the branch that was prepared for it, or after a
        miss with a plain step, as if n-grams had found nothing."""
        outcome = self._outcome(message)
        if self._prepared is None or self._prepared.round != message.round:
            return [outcome]
        committed = (*(message.chain[node] for node in accepted_nodes(self.text, message)), outcome.bonus)
        prepared = self._prepared.proposal(committed)
        left = self._prepared.max_tokens - len(committed)
        if prepared is None and self._prepared.row_costs and left > 0 and set(self._eos).isdisjoint(committed):
            prepared = DraftTokens()
        if prepared is not None:
            at = outcome.base_len + outcome.accepted + 1
            self.autonomous = Verify(message.request, message.epoch, message.round + 1, at, prepared)
        return [structs.replace(outcome, next_proposal=prepared)]

    def _outcome(self, message: Verify) -> Outcome:
        at, nodes = message.base_len, accepted_nodes(self.text, message)
        bonus = self.text[at + len(nodes)]
        path = outcome_path(nodes)
        work = Span(self.now_ns - TURN_NS, self.now_ns)
        idle_ns, self._ended_ns = max(work.started_ns - self._ended_ns, 0), self.now_ns
        return Outcome(message.request, message.epoch, message.round, at, len(nodes), bonus, work, idle_ns, path=path)


class Cluster(FakeWorkers):
    """Runs requests to their end. A drafter has `steps` turns per verify; a message is lost if `drop` returns True."""

    def __init__(
        self,
        text: tuple[int, ...],
        script: Script | None,
        *,
        depth: int = 3,
        branches: int = 8,
        policy: str = "best-first",
        full_depth: bool = False,
        ngrams: bool = True,
        steps: int = 100,
        context: int = 1 << 20,
        drop: Callable[[Message], bool] = lambda message: False,
        others: Sequence[Script] = (),
    ) -> None:
        """`others`: the scripts of additional drafters."""
        self.target = OracleTarget(text, context)
        self.links = [FakeLink(f"draft-{n}") for n in range(1 + len(others))]
        self.link = self.links[0]
        scripts = zip(self.links, [script, *others], strict=True)
        self.workers = {
            link.name: DraftWorker(link, ReplayDrafter(known), FAN_OUT_POLICIES[policy])  # type: ignore[arg-type]
            for link, known in scripts
            if known
        }
        self.sent_to_drafters: list[tuple[str, Message]] = []
        self.events: list[ToFront] = []
        self.sent_to_target: list[Message] = []
        self.target_abilities = Abilities()
        self.worker_notes: list[str] = []
        self._to_target: deque[Message] = deque()
        self._steps = steps
        self._drop = drop
        self._now = 0
        settings = round_settings(depth, branches, full_depth, ngrams)
        self.rounds = Scheduler(self, settings, self.events.append, Trace(None))

    @property
    def target_context(self) -> int:
        return self.target.context

    def notes(self) -> list[str]:
        return self.worker_notes

    def drafters(self) -> set[str]:
        return set(self.workers)

    def send_target(self, message: Message) -> None:
        self.sent_to_target.append(message)
        if not self._drop(message):
            self._to_target.append(codec_round_trip(message))

    def flush_and_yield(self) -> None:
        """Does nothing: messages are delivered by `_turn`."""

    def send_worker(self, name: str, message: Message) -> None:
        self.sent_to_drafters.append((name, message))
        if not self._drop(message):
            next(link for link in self.links if link.name == name).inbox.append(codec_round_trip(message))

    def run(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        mode: str = "ssd",
        eos: frozenset[int] = frozenset(),
        sampling: SamplingParams = GREEDY,
        origins: bool = False,
        rounds: bool = False,
        request: str = "r",
    ) -> RequestEnded:
        sampling = replace(sampling, max_tokens=max_tokens)
        self.rounds.begin(Admit(request, prompt, sampling, mode, eos, origins=origins, rounds=rounds), self._now)
        for _ in range(100 * max_tokens + 1000):
            if not self.rounds.active:
                return next(event for event in self.events if isinstance(event, RequestEnded))
            self._turn()
        raise TimeoutError(f"the request hangs: {self.events[-3:]}")

    @property
    def generated(self) -> list[int]:
        return [token for event in self.events if isinstance(event, Committed) for token in event.tokens]

    @property
    def origins(self) -> list[Origin]:
        return [origin for event in self.events if isinstance(event, Committed) for origin in event.origins or ()]

    @property
    def records(self) -> list[RoundRecord]:
        return [record for event in self.events if isinstance(event, Committed) for record in event.rounds or ()]

    def _turn(self) -> None:
        """The drafter works, then the target answers one message, then overdue waits end."""
        self._work(self._steps)
        self._now += TURN_NS
        self.target.now_ns = self._now
        if self._to_target:
            self._prepare()
            for outcome in self.target.answer(self._to_target.popleft()):
                if not self._drop(outcome):
                    self.rounds.handle([("target-0", codec_round_trip(outcome))], self._now)
            if self.target.autonomous is not None:
                self._to_target.appendleft(self.target.autonomous)
                self.target.autonomous = None
        elif (outcome := self.target.step()) is not None:
            if not self._drop(outcome):
                self.rounds.handle([("target-0", codec_round_trip(outcome))], self._now)
        else:
            self._work(100)
            self._now += 10_000_000_000 if not self._to_target else 0
            self.rounds.on_tick(self._now)

    def _prepare(self) -> None:
        """Delivers the PREPAREs that arrived during the verify, which the target reads before it answers."""
        for message in [message for message in self._to_target if isinstance(message, Prepare)]:
            self._to_target.remove(message)
            self.target.answer(message)

    def _work(self, steps: int) -> None:
        """Runs the loop of each draft worker this many times, and delivers what it sends."""
        for link in self.links:
            if link.name in self.workers:
                self._work_of(link, self.workers[link.name], steps)

    def _work_of(self, link: FakeLink, worker: DraftWorker, steps: int) -> None:
        for _ in range(steps):
            try:
                worker.turn()
            except Idle:
                break
            while link.sent:
                message = link.sent.popleft()
                if not self._drop(message):
                    self.rounds.handle([(link.name, message)], self._now)


__all__ = ["Close", "Cluster", "Resync", "Script"]
