"""A cluster in one thread, without sockets: the real scheduler, draft worker and target worker.

Messages pass through the real codec, and time is virtual. A seeded schedule decides how much the drafter does before an
outcome arrives, which messages are late and which timeouts expire, so a run repeats exactly.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.drafter import Drafter, TokenTree
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.heads.drafter import HeadDrafter
from outrider.drafters.heads.head import Head
from outrider.drafters.mlx import MlxDrafter
from outrider.drafters.ngrams import NgramDrafter
from outrider.engine.load_checks import probe_abilities
from outrider.engine.loading import LoadedModel
from outrider.grammar.compiler import GrammarCompiler
from outrider.orchestrator.core.metrics import ORCHESTRATOR_TRACK, Trace
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.events import Admit, Committed, RequestEnded, ToFront
from outrider.protocol.messages import (
    Abilities,
    DraftTokens,
    Failed,
    Hello,
    KvMemory,
    Message,
    Outcome,
    Span,
    Timings,
    Verify,
)
from outrider.protocol.messages import workers as abilities_of
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.schema import Logprobs
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.fake_workers import FakeWorkers
from tests.harness.settings import round_settings
from tests.system.links import FakeLink, Idle, VirtualClock, codec_round_trip

UNTIL_IDLE = 10_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """`turns`: how many turns of its loop the draft worker gets before each of the target's, one of these at random.

    `late`: the share of its messages that arrive only after the next outcome. `impatient`: how often a wait for the
    drafter times out before it can answer.
    """

    turns: tuple[int, ...] = (UNTIL_IDLE,)
    late: float = 0.0
    impatient: float = 0.0


AMPLE = Schedule()
SLOW = Schedule(turns=(0,))
MIXED = Schedule(turns=(0, 1, 2, 3, 5, UNTIL_IDLE), late=0.2, impatient=0.2)


class Recorder(Trace):
    """Records what each round verifies (`name_round`), and the accepted tokens by origin."""

    def __init__(self) -> None:
        super().__init__(None)
        self.sources: dict[int, str] = {}
        self.accepted: Counter[str] = Counter()

    @property
    def enabled(self) -> bool:
        return True

    def add(self, track: str, name: str, span: Span, **args: Any) -> None:
        if track == ORCHESTRATOR_TRACK:
            self.sources[args["round"]] = name
        self.accepted.update(args.get("by", {}))


class RecordingDrafter:
    """A drafter that keeps the trees that it opens, for tests to inspect."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner
        self.trees: list[TokenTree] = []

    def open(self, *arguments: Any) -> TokenTree:
        self.trees.append(self._inner.open(*arguments))
        return self.trees[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass(frozen=True, slots=True)
class Round:
    """A verification of `chain` (of a tree if it has `parents`) from `source`, after `base_len` tokens.

    `kind`: the class of the proposal, or "drawn" if the chain came with the distribution q that it was drawn from.
    """

    base_len: int
    chain: tuple[int, ...]
    source: str
    kind: str = "DraftTokens"
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A finished request: its `tokens` without the prompt, and its verified rounds.

    `traced`: the accepted tokens by origin, from the trace.
    """

    tokens: list[int]
    reason: str
    timings: Timings
    rounds: list[Round]
    notes: tuple[str, ...]
    logprobs: list[Logprobs]
    traced: Counter[str]

    @property
    def sources(self) -> Counter[str]:
        return Counter(round_.source for round_ in self.rounds)


class Cluster(FakeWorkers):
    """Runs requests to their end. `after_draft` is called after each turn of the drafter, with the latest tree and the
    committed tokens."""

    def __init__(
        self,
        target: LoadedModel,
        drafter: Drafter | None,
        clock: VirtualClock,
        *,
        depth: int = 3,
        branches: int = 6,
        policy: str = "best-first",
        full_depth: bool = False,
        ngrams: bool = True,
        schedule: Schedule = AMPLE,
        seed: int = 0,
        after_draft: Callable[[TokenTree, Sequence[int]], None] | None = None,
        colocated: LoadedModel | None = None,
        kv_memory: int = 0,
        trees: bool = False,
        head: Head | None = None,
    ) -> None:
        """`colocated`, `head`: a draft model and a head in the target's process. `kv_memory`: bytes of each worker's KV
        cache. `trees`: drafts may be trees, if the target can verify them."""
        self._trees = trees
        self._model, self._clock, self._schedule = target, clock, schedule
        self._rng = random.Random(seed)
        self._in_process_model, self._in_process_head, self._kv_memory, self._policy = (
            colocated,
            head,
            kv_memory,
            policy,
        )
        self._head = drafter.head if isinstance(drafter, HeadDrafter) else None
        self.target = self._new_target()
        self._recording_drafter: RecordingDrafter | None = None
        if drafter is not None:
            self._recording_drafter = RecordingDrafter(drafter)
        self._draft_worker = self._new_drafter()
        self.after_draft = after_draft
        self._events: list[ToFront] = []
        self._verifies: list[Verify] = []
        self._tokens: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._recorder = Recorder()
        settings = round_settings(depth, branches, full_depth, ngrams)
        self.rounds = Scheduler(self, settings, self._on_event, self._recorder)
        self._serial = 0
        self._autonomous = False

    def _new_link(self, name: str) -> FakeLink:
        link = FakeLink(name)
        link.inbox += [codec_round_trip(KvMemory(self._kv_memory))] if self._kv_memory else []
        return link

    def _new_target(self) -> TargetWorker:
        self._target_link = self._new_link("target-0")
        found: dict[str, Drafter | NgramDrafter] = {}
        if self._in_process_model is not None:
            found["draft"] = MlxDrafter(self._in_process_model)
        if self._in_process_head is not None:
            found["head"] = HeadDrafter(self._in_process_head, self._model.vocab_size)
        own = InProcessDrafters(found)
        return TargetWorker(self._target_link, self._model, drafters=own, remote_head=self._head)  # type: ignore[arg-type]

    def _new_drafter(self) -> DraftWorker | None:
        self._draft_link = self._new_link("draft-0")
        if self._recording_drafter is None:
            return None
        compiler = GrammarCompiler(self._model.folder)
        return DraftWorker(self._draft_link, self._recording_drafter, FAN_OUT_POLICIES[self._policy], compiler=compiler)

    # --- the worker pool's interface for the scheduler ------------------------------------------------------------

    @property
    def target_context(self) -> int:
        return self._model.context_length

    @property
    def target_abilities(self) -> Abilities:
        own = (abilities_of.InProcessDrafter("draft"),) if self._in_process_model is not None else ()
        own += (abilities_of.InProcessDrafter("head", is_head=True),) if self._in_process_head is not None else ()
        trees = self._trees and self.target.verifies_trees
        return structs.replace(probe_abilities(self._model), drafters=own, trees=trees)

    def notes(self) -> list[str]:
        return [] if self.target_abilities.chains else [f"speculation is off: {self.target_abilities.why}"]

    def drafters(self) -> set[str]:
        return {"draft-0"} if self._draft_worker is not None else set()

    def hello(self, name: str) -> Hello:
        return structs.replace(super().hello(name), features="features" if self._head is not None else "")

    def send_target(self, message: Message) -> None:
        if isinstance(message, Verify):
            self._autonomous = message.autonomous
            self._verifies += [] if message.draft else [message]
        self._target_link.inbox.append(codec_round_trip(message))

    def flush_and_yield(self) -> None:
        """Does nothing: messages are delivered when they are sent."""

    def send_worker(self, name: str, message: Message) -> None:
        self._draft_link.inbox.append(codec_round_trip(message))

    # --- the interface for tests ----------------------------------------------------------------------------------

    def run(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        mode: str = "ssd",
        eos: frozenset[int] = frozenset(),
        resume_tokens: Sequence[int] = (),
        drafter: str = "",
    ) -> Run:
        """Runs a request. `resume_tokens`: the first tokens of its text, generated by another cluster."""
        self._events, self._verifies, self._tokens, self._recorder.sources = [], [], list(prompt), {}
        self._logprobs, self._recorder.accepted = [], Counter()
        self._serial += 1
        if self._recording_drafter is not None:
            self._recording_drafter.trees.clear()
        admit = Admit(
            f"r{self._serial}", tuple(prompt), sampling, mode, eos, resume_tokens=tuple(resume_tokens), drafter=drafter
        )
        self.rounds.begin(admit, self._clock())
        for _ in range(100 * sampling.max_tokens + 1000):
            if not self.rounds.active:
                return self._result(len(prompt))
            self._turn()
        raise TimeoutError(f"the request hangs: {self._events[-3:]}")

    def run_concurrently(
        self, prompt: Sequence[int], samplings: Sequence[SamplingParams], mode: str
    ) -> list[list[int]]:
        """Runs several requests concurrently, each started a turn after the previous one, and returns their tokens."""
        self._events, self._recorder.sources, names = [], {}, []
        for sampling in samplings:
            self._serial += 1
            names.append(f"r{self._serial}")
            self.rounds.begin(Admit(names[-1], tuple(prompt), sampling, mode, frozenset()), self._clock())
            self._turn()
        for _ in range(100 * sum(sampling.max_tokens for sampling in samplings)):
            if not self.rounds.active:
                break
            self._turn()
        if sum(isinstance(event, RequestEnded) for event in self._events) < len(names):
            raise TimeoutError(f"a request hangs or broke: {self._events[-3:]}")
        committed = [event for event in self._events if isinstance(event, Committed)]
        return [[token for event in committed if event.request == name for token in event.tokens] for name in names]

    def lose_drafter(self) -> None:
        self._draft_worker = None
        self.rounds.on_drafter_lost("draft-0", "draft worker draft-0 was lost", self._clock())

    def replace_drafter(self) -> None:
        """Replaces the drafter by a new one at once."""
        if self._draft_worker is not None:
            self._draft_worker.forget()
        self.lose_drafter()
        self._draft_worker = self._new_drafter()
        self.rounds.on_drafter_ready("draft-0")

    def replace_target(self) -> None:
        """Replaces the target by a new one at once, without its requests."""
        self.target = self._new_target()
        self.rounds.on_target_lost("target worker target-0 was lost", False)
        self.rounds.on_target_ready()

    def _result(self, prompt_len: int) -> Run:
        last = self._events[-1]
        if isinstance(last, Failed) or not isinstance(last, RequestEnded):
            raise RuntimeError(f"the request broke: {last}")
        sources = self._recorder.sources  # a VERIFY that only prolongs autonomous rounds is not among them
        rounds = [
            Round(
                v.base_len,
                v.chain,
                sources[v.round],
                "drawn" if getattr(v.proposal, "q", None) is not None else type(v.proposal).__name__,
                v.parents,
            )
            for v in self._verifies
            if v.round in sources
        ]
        generated = self._tokens[prompt_len:]
        traced = self._recorder.accepted
        return Run(generated, last.reason, last.timings, rounds, last.notes, self._logprobs, traced)

    def _on_event(self, event: ToFront) -> None:
        self._events.append(event)
        if isinstance(event, Committed):
            self._tokens += event.tokens
            self._logprobs += [event.logprobs] if event.logprobs is not None else []

    # --- time -----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Runs some turns of the drafter and one of the target. If the target is idle, the drafter runs until it is."""
        late = list(self._run_drafter(self._rng.choice(self._schedule.turns)))
        if self._run_target_turn():
            self._deliver(late)
            return
        if self._rng.random() >= self._schedule.impatient:
            self._deliver([*late, *self._run_drafter(UNTIL_IDLE)])
        if not self._target_link.inbox:
            self._clock.skip(10_000_000_000)
            self.rounds.on_tick(self._clock())

    def _run_target_turn(self) -> bool:
        """Runs one turn of the target's loop, and delivers its messages. Returns False if it was idle."""
        try:
            self.target.turn()
        except Idle:
            if not self._target_link.sent:
                return False
        while self._target_link.sent:
            message = self._target_link.sent.popleft()
            self.rounds.handle([("target-0", message)], self._clock())
            if isinstance(message, Outcome) and message.drafted is not None:
                self._verifies.append(
                    Verify(
                        message.request,
                        message.epoch,
                        message.round,
                        message.base_len,
                        DraftTokens(message.drafted.chain, message.drafted.parents),
                    )
                )
            if isinstance(message, Outcome) and message.next_proposal is not None and not self._autonomous:
                base_len = message.base_len + message.accepted + 1
                place = message.request, message.epoch, message.round + 1, base_len
                self._verifies.append(Verify(*place, message.next_proposal))
        return True

    def _run_drafter(self, turns: int) -> Iterator[Message]:
        """Runs some turns of the draft worker's loop. Delivers its messages, except for late ones, which it yields."""
        for _ in range(turns):
            if self._draft_worker is None:
                return
            try:
                self._draft_worker.turn()
            except Idle:
                return
            self._call_after_draft()
            while self._draft_link.sent:
                message = self._draft_link.sent.popleft()
                if self._rng.random() < self._schedule.late:
                    yield message
                else:
                    self._deliver([message])

    def _deliver(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if self._draft_worker is not None:
                self.rounds.handle([("draft-0", message)], self._clock())

    def _call_after_draft(self) -> None:
        if self.after_draft is not None and self._recording_drafter is not None:
            for tree in self._recording_drafter.trees[-1:]:
                self.after_draft(tree, self._tokens)
