"""A cluster in one thread on a bad network, in virtual time: the real scheduler, target worker and draft workers.

It replaces the orchestrator's worker pool: the loss of a worker is noticed some ticks later, its replacement has a new
link, and messages of its predecessor are dropped. One seed determines everything. Messages and events are checked by
an `InvariantChecker`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.drafters.mlx import MlxDrafter
from outrider.engine.load_checks import probe_abilities
from outrider.engine.loading import LoadedModel
from outrider.orchestrator.core.metrics import Trace
from outrider.orchestrator.core.scheduler import Scheduler
from outrider.orchestrator.core.worker_registry import MAX_INVALID_MESSAGES
from outrider.orchestrator.events import Admit
from outrider.protocol.messages import Abilities, Hello, InProcessDrafter, KvMemory, Message, Outcome
from outrider.target_worker.in_process_drafters import InProcessDrafters
from outrider.target_worker.worker import TargetWorker
from tests.fake_workers import FakeWorkers
from tests.harness.settings import round_settings
from tests.network.invariants import InvariantChecker
from tests.network.transport import NO_FAULTS, EventLog, LinkFaults, OneWayLink
from tests.system.links import FakeReceiver, Idle, VirtualClock

TARGET = "target-0"
KV_LIMIT = 1 << 16
MILLISECOND_NS = 1_000_000
LATE_SHARE = 0.25  # how often a worker that polls its link does not get the next message yet
# The maximum number of ticks until a lost worker is noticed, and then until its replacement is ready.
NOTICE_TICKS, RETURN_TICKS = 6, 12


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The settings of a cluster. `colocated`: the target drafts in its own process, and there are no other drafters.

    `paces[n]`: drafter n works once in so many ticks. `other_model`: the last of several drafters runs another model.
    """

    seed: int = 0
    drafters: int = 1
    colocated: bool = False
    depth: int = 3
    branches: int = 6
    full_depth: bool = False
    ngrams: bool = True
    paces: tuple[int, ...] = ()
    other_model: bool = False


@dataclass
class Link(FakeReceiver):
    """A worker's link on the simulated network. `inbox`: the messages that have arrived."""

    name: str
    down: OneWayLink
    up: OneWayLink
    checker: InvariantChecker
    rng: random.Random
    inbox: deque[Message] = field(default_factory=deque)

    def receive(self, wait: bool) -> Message | None:
        """Returns the next message. A poll without `wait` sometimes misses it, as if it arrived during a forward."""
        message = super().receive(wait) if wait or self.rng.random() >= LATE_SHARE else None
        if message is not None:
            self.checker.on_received(self.name, message)
        return message

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.checker.on_worker_message(self.name, message)
        self.up.send(*messages)


@dataclass
class WorkerProcess:
    """A worker process. `known`: the orchestrator uses it. `joined`: it has not given it up, so messages pass. `alive`:
    it has not been killed. `stopped`: it is suspended. `invalid`: the number of its messages that the orchestrator
    found invalid."""

    name: str
    link: Link
    worker: TargetWorker | DraftWorker
    known: bool = True
    joined: bool = True
    alive: bool = True
    stopped: bool = False
    invalid: int = 0

    def run_turns(self, count: int) -> None:
        try:
            for _ in range(count):
                self.worker.turn()
        except Idle:
            pass


class SimulatedCluster(FakeWorkers):
    """The cluster. `target` and `draft` are its models, and `other_model` that of the last drafter if it differs."""

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        settings: ClusterSettings,
        clock: VirtualClock,
        other_model: LoadedModel | None = None,
    ) -> None:
        self.settings = settings
        self.log = EventLog()
        disagrees = f"draft-{settings.drafters - 1}" if settings.other_model and settings.drafters > 1 else ""
        self._other_model = other_model
        self._others = {disagrees: other_model} if other_model is not None and disagrees else {}
        self.checker = InvariantChecker(target, draft, clock, self._others)
        self._target, self._draft, self._clock = target, draft, clock
        self._rng = random.Random(settings.seed)
        self._faults_ended = False
        self._outgoing: dict[str, list[Message]] = {}
        self._scheduled: list[tuple[int, str, WorkerProcess]] = []  # at this tick, this event, of this worker
        self._link_faults: dict[str, LinkFaults] = {}
        self._swapped: set[str] = set()  # drafters whose replacements have another model
        rounds = round_settings(settings.depth, settings.branches, settings.full_depth, settings.ngrams)
        self.rounds = Scheduler(self, rounds, self.checker.on_event, Trace(None))
        drafters = 0 if settings.colocated else settings.drafters
        self.processes = {name: self._start(name) for name in (TARGET, *(f"draft-{n}" for n in range(drafters)))}
        self.checker.rounds = self.rounds

    # --- the worker pool's interface for the scheduler ------------------------------------------------------------

    @property
    def target_context(self) -> int:
        return self._target.context_length

    @property
    def target_abilities(self) -> Abilities:
        own = (InProcessDrafter("draft"),) if self.settings.colocated else ()
        return replace(probe_abilities(self._target), drafters=own)

    def notes(self) -> list[str]:
        return []

    def drafters(self) -> set[str]:
        return {process.name for process in self.processes.values() if process.name != TARGET and process.known}

    def hello(self, name: str) -> Hello:
        return Hello("draft", name, 0, "", "", self._draft.vocab_size, 0, int(name in self._others), 0, incarnation=0)

    def record_invalid(self, name: str, kind: str) -> None:
        """Counts an invalid message of a worker, and ends the worker after too many."""
        process = self.processes[name]
        process.invalid += 1
        self.log.write("invalid", name, [kind])
        if process.invalid == MAX_INVALID_MESSAGES:
            self.kill(name)

    def send_target(self, message: Message) -> None:
        self.send_worker(TARGET, message)

    def send_worker(self, name: str, message: Message) -> None:
        self.checker.on_sent(message)
        self._outgoing.setdefault(name, []).append(message)

    def flush_and_yield(self) -> None:
        """Sends each worker its queued messages as one bundle."""
        for name, messages in self._outgoing.items():
            process = self.processes[name]
            if process.alive and process.joined:
                process.link.down.send(*messages)
        self._outgoing.clear()

    # --- events ---------------------------------------------------------------------------------------------------

    def begin(self, admit: Admit) -> None:
        self.checker.on_begin(admit)
        self.log.write("begin", admit.request, [admit.mode])
        self.rounds.begin(admit, self._clock())
        self.flush_and_yield()

    def stop(self, request: str, reason: str) -> None:
        self.checker.on_stop(request, reason)
        self.log.write("stop", request, [reason])
        self.rounds.stop(request, reason)
        self.flush_and_yield()

    def tick(self) -> None:
        """Lets some time pass: messages arrive, workers run, timeouts expire, losses are noticed."""
        self.log.tick += 1
        self._clock.skip(self._rng.choice((1, 5, 20) if self.has_messages_in_flight else (200,)) * MILLISECOND_NS)
        self._run_scheduled()
        for process in self._alive():
            process.link.inbox += process.link.down.receive()
        arrived = [(process, message) for process in self._alive() for message in process.link.up.receive()]
        received = [(process.name, message) for process, message in arrived if process.joined]
        received.sort(key=lambda arrival: isinstance(arrival[1], Outcome))
        self._handle(received)
        for process in self._alive():
            if not process.stopped:
                process.run_turns(self._rng.choice((0, 1, 1, 2, 5)) if self._works_this_tick(process.name) else 0)
                self.checker.check_worker(process.worker)
        self.rounds.on_tick(self._clock())
        self.flush_and_yield()

    def pause(self, seconds: int) -> None:
        """Suspends the orchestrator, or the whole machine."""
        self.log.write("pause", "", [str(seconds)])
        self._clock.skip(seconds * 1000 * MILLISECOND_NS)

    def set_faults(self, name: str, faults: LinkFaults) -> None:
        """Sets the faults of both directions of a worker's link, also for its replacements."""
        self._link_faults[name] = faults
        for direction in self._directions(name):
            direction.faults = faults

    def cut(self, name: str, ticks: int, lost: bool) -> None:
        """Cuts a worker's link for so many ticks. Messages in flight arrive afterwards, or are `lost`."""
        self.log.write("cut", name)
        for direction in self._directions(name):
            direction.cut = True
        self._scheduled.append((self.log.tick + ticks, "connection lost" if lost else "healed", self.processes[name]))

    def stall(self, name: str, ticks: int) -> None:
        """Suspends a worker for so many ticks. The orchestrator does without a drafter once it notices."""
        process = self.processes[name]
        if process.alive and not process.stopped:
            self.log.write("stall", name)
            process.stopped = True
            self._scheduled.append((self.log.tick + ticks, "resumed", process))
            if name != TARGET:
                self._schedule(NOTICE_TICKS, "frozen", process)

    def sleep(self, name: str, ticks: int) -> None:
        """Suspends a worker until so many ticks after it was given up, as on a host that sleeps. It joins again."""
        process = self.processes[name]
        if process.alive and not process.stopped and process.joined:
            self.log.write("sleep", name)
            process.stopped = True
            self._schedule(NOTICE_TICKS, "given up", process)
            self._scheduled.append((self.log.tick + NOTICE_TICKS + ticks, "awake", process))

    def kill(self, name: str, with_other_model: bool = False) -> None:
        """Kills a worker. All messages to and from it are lost. Its replacement, if it is a drafter, has the other one
        of both models `with_other_model`."""
        process = self.processes[name]
        if not process.alive:
            return
        self.log.write("kill", name)
        if with_other_model and name != TARGET and self._other_model is not None:
            self._swapped.add(name)
        process.alive = False
        process.link.down.drop_all()
        process.link.up.drop_all()
        self._schedule(NOTICE_TICKS, "lost", process)

    def end_faults(self) -> None:
        """Ends the faults, and lets all workers run in every tick. Cut links and lost workers return as planned."""
        self.log.write("calm")
        self._faults_ended = True
        for name in self.processes:
            self.set_faults(name, NO_FAULTS)

    @property
    def is_settled(self) -> bool:
        """Whether no request is active and no event is scheduled."""
        return not self.rounds.active and not self._scheduled

    @property
    def has_messages_in_flight(self) -> bool:
        """Whether any message is in flight or in an inbox; if not, a tick lasts longer."""
        return any(
            process.link.inbox or not all(direction.is_empty for direction in self._directions(process.name))
            for process in self._alive()
        )

    def _works_this_tick(self, name: str) -> bool:
        """Whether this worker runs in this tick."""
        drafters, paces = sorted(self.processes, key=lambda known: (known == TARGET, known)), self.settings.paces
        pace = dict(zip(drafters, paces, strict=False)).get(name, 1) if name != TARGET else 1
        return self._faults_ended or self.log.tick % pace == 0

    def _handle(self, received: list[tuple[str, Message]]) -> None:
        """Passes all messages to the scheduler together, like the orchestrator's loop; repeated outcomes one by one."""
        if self.checker.has_repeats([message for _, message in received]):
            for one in received:
                self._pass_to_scheduler([one])
        elif received:
            self._pass_to_scheduler(received)

    def _pass_to_scheduler(self, received: list[tuple[str, Message]]) -> None:
        self.checker.before_messages([message for _, message in received])
        self.rounds.handle(received, self._clock())
        self.flush_and_yield()
        for process in self.processes.values():
            forged = process.link.up.forged
            counts = f"{process.name} has {process.invalid} invalid messages, of {forged} altered ones"
            self.checker.check("validity", process.invalid <= forged, counts)
        self.checker.on_messages([message for _, message in received])

    def _alive(self) -> list[WorkerProcess]:
        return [process for process in self.processes.values() if process.alive]

    def _directions(self, name: str) -> Iterator[OneWayLink]:
        link = self.processes[name].link
        yield from (link.down, link.up)

    def _schedule(self, ticks: int, what: str, process: WorkerProcess) -> None:
        self._scheduled.append((self.log.tick + self._rng.randint(1, ticks), what, process))

    def _run_scheduled(self) -> None:
        due = [coming for coming in self._scheduled if coming[0] <= self.log.tick]
        self._scheduled = [coming for coming in self._scheduled if coming[0] > self.log.tick]
        for _, what, process in due:
            self.log.write(what, process.name)
            match what:
                case "lost":
                    self._on_lost(process)
                    self._schedule(RETURN_TICKS, "back", process)
                case "back":
                    self._swap_model(process.name)
                    self.processes[process.name] = self._start(process.name)
                    self._on_ready(process.name)
                case "healed" | "connection lost":
                    for direction in (process.link.down, process.link.up):
                        direction.cut = False
                        if what == "connection lost":
                            direction.drop_all()
                case "given up" if process.alive:
                    process.joined = False
                    self._on_lost(process)
                case "awake" if process.alive:
                    process.stopped = False
                    self._schedule(RETURN_TICKS, "joined again", process)
                case "joined again" if process.alive:
                    process.joined = process.known = True
                    process.worker.forget()
                    process.link.inbox.clear()
                    process.link.inbox.append(KvMemory(KV_LIMIT))
                    for direction in (process.link.down, process.link.up):
                        direction.drop_all()
                    self._on_ready(process.name)
                case "resumed":
                    process.stopped = False
                    self._schedule(NOTICE_TICKS, "thawed", process)
                case "frozen" if process.alive and process.stopped:
                    self._on_lost(process)
                case "thawed" if process.alive and process.joined and not process.stopped and not process.known:
                    process.known = True
                    self._on_ready(process.name)
            self.flush_and_yield()

    def _swap_model(self, name: str) -> None:
        """Gives the next process of this drafter the other one of both models, if it was killed for that."""
        if name in self._swapped and self._other_model is not None:
            self._swapped.remove(name)
            if self._others.pop(name, None) is None:
                self._others[name] = self._other_model
            self.checker.set_models(self._others)

    def _on_lost(self, process: WorkerProcess) -> None:
        was_known, process.known = process.known, False
        if process.name == TARGET and was_known:
            self.checker.on_target_lost()
            self.rounds.on_target_lost("the target died", False)
        elif process.name != TARGET and was_known:
            self.rounds.on_drafter_lost(process.name, f"{process.name} was lost", self._clock())

    def _on_ready(self, name: str) -> None:
        """Reports that a worker can be used."""
        if name == TARGET:
            self.rounds.on_target_ready()
        else:
            self.rounds.on_drafter_ready(name)

    def _start(self, name: str) -> WorkerProcess:
        """Returns a new worker of this name that has joined."""
        down = OneWayLink(f"{name} <-", self._rng, self.log, authenticated=True)
        up = OneWayLink(f"{name} ->", self._rng, self.log, authenticated=name == TARGET)
        link = Link(name, down, up, self.checker, self._rng)
        down.faults = up.faults = self._link_faults.get(name, NO_FAULTS)
        link.inbox.append(KvMemory(KV_LIMIT))
        if name == TARGET:
            own = InProcessDrafters({"draft": MlxDrafter(self._draft)} if self.settings.colocated else {})
            return WorkerProcess(name, link, TargetWorker(link, self._target, drafters=own))  # type: ignore[arg-type]
        drafter = MlxDrafter(self._others.get(name, self._draft))
        return WorkerProcess(name, link, DraftWorker(link, drafter, FAN_OUT_POLICIES["best-first"]))
