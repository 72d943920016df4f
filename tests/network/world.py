"""A whole cluster in one thread on a bad network: the real rounds, target worker and draft workers, in virtual time.

What the orchestrator's pool does with sockets is done here by name: a worker's loss is noticed after a while, its
successor has its own link, and messages of the predecessor are dropped. Everything follows from one seed. Checks
nothing: `watch` receives every message and event.
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
from outrider.target_worker.in_process_drafters import InProcessDrafters, InProcessModel
from outrider.target_worker.worker import TargetWorker
from tests.fake_workers import FakeWorkers
from tests.harness.settings import round_settings
from tests.network.transport import CLEAR, Journal, Way, Weather
from tests.network.watch import Watch
from tests.system.links import Idle, Listening, VirtualClock

TARGET = "target-0"
KV_LIMIT = 1 << 16
MILLISECOND_NS = 1_000_000
STILL_ON_ITS_WAY = 0.25  # the share of looks without a wait for which the next message has not arrived yet
# A lost worker is noticed after so many ticks at most, and its successor is there after as many more.
NOTICED, RETURNED = 6, 12


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings of a cluster. `colocated`: the target drafts for itself, and there are no other drafters.

    `paces[n]`: drafter n works in one of so many ticks. `another`: the last of several drafters runs another model.
    """

    seed: int = 0
    drafters: int = 1
    colocated: bool = False
    depth: int = 3
    branches: int = 6
    full_depth: bool = False
    ngrams: bool = True
    paces: tuple[int, ...] = ()
    another: bool = False


@dataclass
class Link(Listening):
    """A worker's link on the network, with the messages that it has received."""

    name: str
    down: Way
    up: Way
    watch: Watch
    rng: random.Random
    inbox: deque[Message] = field(default_factory=deque)

    def receive(self, wait: bool) -> Message | None:
        """Returns the next message. Some arrive only during a forward, or while a prompt is read."""
        message = super().receive(wait) if wait or self.rng.random() >= STILL_ON_ITS_WAY else None
        if message is not None:
            self.watch.on_received(self.name, message)
        return message

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.watch.on_worker_message(self.name, message)
        self.up.put(*messages)


@dataclass
class Node:
    """A worker process. `known`: the orchestrator uses it; `alive`: it runs; `stopped`: it does nothing. `invalid`: the
    number of its messages that the orchestrator found invalid."""

    name: str
    link: Link
    worker: TargetWorker | DraftWorker
    known: bool = True
    alive: bool = True
    stopped: bool = False
    invalid: int = 0

    def turns(self, count: int) -> None:
        try:
            for _ in range(count):
                self.worker.turn()
        except Idle:
            pass


class World(FakeWorkers):
    """The cluster; `target` and `draft` are its models, and `another` that of the last drafter."""

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        setting: Setting,
        clock: VirtualClock,
        another: LoadedModel | None = None,
    ) -> None:
        self.setting = setting
        self.journal = Journal()
        disagrees = f"draft-{setting.drafters - 1}" if setting.another and setting.drafters > 1 else ""
        self._others = {disagrees: another} if another is not None and disagrees else {}
        self.watch = Watch(target, draft, clock, self._others)
        self._target, self._draft, self._clock = target, draft, clock
        self._rng = random.Random(setting.seed)
        self._is_calm = False
        self._going: dict[str, list[Message]] = {}
        self._coming: list[tuple[int, str, Node]] = []  # tick, what is noticed then, of which worker
        self._weather: dict[str, Weather] = {}
        rounds = round_settings(setting.depth, setting.branches, setting.full_depth, setting.ngrams)
        self.rounds = Scheduler(self, rounds, self.watch.on_event, Trace(None))
        drafters = 0 if setting.colocated else setting.drafters
        self.nodes = {name: self._started(name) for name in (TARGET, *(f"draft-{n}" for n in range(drafters)))}
        self.watch.rounds = self.rounds

    # --- the pool's interface for the rounds ----------------------------------------------------------------------

    @property
    def target_context(self) -> int:
        return self._target.context_length

    @property
    def target_abilities(self) -> Abilities:
        own = (InProcessDrafter("draft"),) if self.setting.colocated else ()
        return replace(probe_abilities(self._target), drafters=own)

    def notes(self) -> list[str]:
        return []

    def drafters(self) -> set[str]:
        return {node.name for node in self.nodes.values() if node.name != TARGET and node.known}

    def hello(self, name: str) -> Hello:
        return Hello("draft", name, 0, 0, "", "", self._draft.vocab_size, 0, int(name in self._others), 0)

    def record_invalid(self, name: str, kind: str) -> None:
        """Counts an invalid message. Too many end the worker; its successor starts at zero."""
        node = self.nodes[name]
        node.invalid += 1
        self.journal.write("invalid", name, [kind])
        if node.invalid == MAX_INVALID_MESSAGES:
            self.kill(name)

    def send_target(self, message: Message) -> None:
        self.send_worker(TARGET, message)

    def send_worker(self, name: str, message: Message) -> None:
        self.watch.on_sent(message)
        self._going.setdefault(name, []).append(message)

    def flush_and_yield(self) -> None:
        """Sends each worker its messages together."""
        for name, messages in self._going.items():
            node = self.nodes[name]
            if node.alive:
                node.link.down.put(*messages)
        self._going.clear()

    # --- events ---------------------------------------------------------------------------------------------------

    def begin(self, admit: Admit) -> None:
        self.watch.on_begin(admit)
        self.journal.write("begin", admit.request, [admit.mode])
        self.rounds.begin(admit, self._clock())
        self.flush_and_yield()

    def stop(self, request: str, reason: str) -> None:
        self.watch.on_stop(request, reason)
        self.journal.write("stop", request, [reason])
        self.rounds.stop(request, reason)
        self.flush_and_yield()

    def tick(self) -> None:
        """Lets some time pass: messages arrive, workers work, waits end, losses are noticed."""
        self.journal.tick += 1
        self._clock.skip(self._rng.choice((1, 5, 20) if self.moves else (200,)) * MILLISECOND_NS)
        self._notice()
        for node in self._alive():
            node.link.inbox += node.link.down.arrived()
        arrived = [(node.name, message) for node in self._alive() for message in node.link.up.arrived()]
        arrived.sort(key=lambda arrival: isinstance(arrival[1], Outcome))
        self._handle(arrived)
        for node in self._alive():
            if not node.stopped:
                node.turns(self._rng.choice((0, 1, 1, 2, 5)) if self._can_work(node.name) else 0)
                self.watch.check_worker(node.worker)
        self.rounds.on_tick(self._clock())
        self.flush_and_yield()

    def pause(self, seconds: int) -> None:
        """Suspends the orchestrator, or the whole machine."""
        self.journal.write("pause", "", [str(seconds)])
        self._clock.skip(seconds * 1000 * MILLISECOND_NS)

    def weather(self, name: str, weather: Weather) -> None:
        """Sets the faults of both directions of a worker's link, and of its successors' links."""
        self._weather[name] = weather
        for way in self._ways(name):
            way.weather = weather

    def cut(self, name: str, ticks: int, lost: bool) -> None:
        """Cuts a worker's link for so many ticks. The messages on their way arrive afterwards, or are `lost`."""
        self.journal.write("cut", name)
        for way in self._ways(name):
            way.cut = True
        self._coming.append((self.journal.tick + ticks, "lost way" if lost else "healed", self.nodes[name]))

    def stall(self, name: str, ticks: int) -> None:
        """Stops a worker for so many ticks. The orchestrator continues without a drafter once it notices."""
        node = self.nodes[name]
        if node.alive and not node.stopped:
            self.journal.write("stall", name)
            node.stopped = True
            self._coming.append((self.journal.tick + ticks, "woken", node))
            if name != TARGET:
                self._after(NOTICED, "frozen", node)

    def kill(self, name: str) -> None:
        """Ends a worker's process, with all messages to and from it."""
        node = self.nodes[name]
        if not node.alive:
            return
        self.journal.write("kill", name)
        node.alive = False
        node.link.down.lose_all()
        node.link.up.lose_all()
        self._after(NOTICED, "lost", node)

    def calm(self) -> None:
        """Ends the faults, and lets all workers work in every tick. Cut links and lost workers return in their time."""
        self.journal.write("calm")
        self._is_calm = True
        for name in self.nodes:
            self.weather(name, CLEAR)

    @property
    def is_settled(self) -> bool:
        """Whether no request runs, and nothing remains to be noticed."""
        return not self.rounds.active and not self._coming

    @property
    def moves(self) -> bool:
        """Whether any message is on its way; else time passes quickly."""
        return any(node.link.inbox or not all(way.is_empty for way in self._ways(node.name)) for node in self._alive())

    def _can_work(self, name: str) -> bool:
        """Returns whether this worker works in this tick."""
        drafters, paces = sorted(self.nodes, key=lambda known: (known == TARGET, known)), self.setting.paces
        pace = dict(zip(drafters, paces, strict=False)).get(name, 1) if name != TARGET else 1
        return self._is_calm or self.journal.tick % pace == 0

    def _handle(self, arrived: list[tuple[str, Message]]) -> None:
        """Handles messages together, as the orchestrator's loop does; one by one if an outcome is repeated."""
        if self.watch.has_repeats([message for _, message in arrived]):
            for one in arrived:
                self._take([one])
        elif arrived:
            self._take(arrived)

    def _take(self, arrived: list[tuple[str, Message]]) -> None:
        self.watch.before_messages([message for _, message in arrived])
        self.rounds.handle(arrived, self._clock())
        self.flush_and_yield()
        for node in self.nodes.values():
            forged = node.link.up.forged
            counts = f"{node.name} has {node.invalid} invalid messages, of {forged} altered ones"
            self.watch.judge("honest", node.invalid <= forged, counts)
        self.watch.on_messages([message for _, message in arrived])

    def _alive(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.alive]

    def _ways(self, name: str) -> Iterator[Way]:
        link = self.nodes[name].link
        yield from (link.down, link.up)

    def _after(self, ticks: int, what: str, node: Node) -> None:
        self._coming.append((self.journal.tick + self._rng.randint(1, ticks), what, node))

    def _notice(self) -> None:
        due = [coming for coming in self._coming if coming[0] <= self.journal.tick]
        self._coming = [coming for coming in self._coming if coming[0] > self.journal.tick]
        for _, what, node in due:
            self.journal.write(what, node.name)
            match what:
                case "lost":
                    self._lost(node)
                    self._after(RETURNED, "back", node)
                case "back":
                    self.nodes[node.name] = self._started(node.name)
                    self._found(node.name)
                case "healed" | "lost way":
                    for way in (node.link.down, node.link.up):
                        way.cut = False
                        if what == "lost way":
                            way.lose_all()
                case "woken":
                    node.stopped = False
                    self._after(NOTICED, "thawed", node)
                case "frozen" if node.alive and node.stopped:
                    self._lost(node)
                case "thawed" if node.alive and not node.stopped and not node.known:
                    node.known = True
                    self._found(node.name)
            self.flush_and_yield()

    def _lost(self, node: Node) -> None:
        was_known, node.known = node.known, False
        if node.name == TARGET:
            self.watch.on_target_lost()
            self.rounds.on_target_lost("the target died", False)
        elif was_known:
            self.rounds.on_drafter_lost(node.name, f"{node.name} was lost", self._clock())

    def _found(self, name: str) -> None:
        """Reports that a worker can be used."""
        if name == TARGET:
            self.rounds.on_target_ready()
        else:
            self.rounds.on_drafter_ready(name)

    def _started(self, name: str) -> Node:
        """Returns a new process of this name that has joined."""
        down = Way(f"{name} <-", self._rng, self.journal, sealed=True)
        up = Way(f"{name} ->", self._rng, self.journal, sealed=name == TARGET)
        link = Link(name, down, up, self.watch, self._rng)
        down.weather = up.weather = self._weather.get(name, CLEAR)
        link.inbox.append(KvMemory(KV_LIMIT))
        if name == TARGET:
            own = InProcessDrafters(
                {"draft": InProcessModel(MlxDrafter(self._draft))} if self.setting.colocated else {}
            )
            return Node(name, link, TargetWorker(link, self._target, drafters=own))  # type: ignore[arg-type]
        drafter = MlxDrafter(self._others.get(name, self._draft))
        return Node(name, link, DraftWorker(link, drafter, FAN_OUT_POLICIES["best-first"]))
