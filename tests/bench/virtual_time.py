"""A whole cluster in one thread and in virtual time: the real rounds, the real draft worker, a profile's machine.

Nothing sleeps: forwards and messages take a latency profile's time on a clock of their own, so a minute of a simulated
machine takes seconds and repeats exactly. What real processes add (sockets, scheduling, Python) is left out, but for
`hop_ms`, the one-way time of any message.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from outrider.draft_worker.worker import DraftWorker
from outrider.drafting.fan_out import POLICIES
from outrider.drafting.paced import PacedDrafter
from outrider.drafting.replay import ReplayDrafter, Script
from outrider.engine.pace import Pace
from outrider.orchestrator.core.request import RoundSettings
from outrider.orchestrator.core.rounds import Rounds
from outrider.orchestrator.core.trace import Trace
from outrider.orchestrator.core.tuning import Tuning
from outrider.orchestrator.events import Admit, Committed, Ended, ToFront
from outrider.protocol import clock
from outrider.protocol.abilities import Abilities
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.messages import Close, Halt, Message, Open, Outcome, Prepare, Span, Timings, Verify
from outrider.protocol.profile import Profile
from outrider.protocol.sampling import SamplingParams
from tests.honest import HonestWorkers
from tests.known_text import held, path_of

VOCAB = 4096
PROMPT_TOKENS = 8
Texts = Sequence[tuple[int, ...]]
Deliver = Callable[[str, Message], None]
# How long the target waits for a word about those who can't go on by themselves, seconds.
GRACE = 0.001


def random_texts(count: int, length: int, seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Texts in which nothing repeats, so that n-grams find nothing."""
    rng = random.Random(seed)
    return tuple(tuple(rng.randrange(VOCAB) for _ in range(length)) for _ in range(count))


class World:
    """Seconds, and what happens when. Of two things at once BRANCHES come first, as the core sorts them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._serial = 0

    @property
    def idle(self) -> bool:
        return not self._events

    def now_ns(self) -> int:
        return round(self.now * 1e9)

    def clock(self) -> float:
        return self.now

    def after(self, seconds: float, happen: Callable[[], None], last: bool = False) -> None:
        self._serial += 1
        heapq.heappush(self._events, (self.now + seconds, int(last), self._serial, happen))

    def step(self) -> None:
        """Goes on to the next thing that happens."""
        self.now, _, _, happen = heapq.heappop(self._events)
        happen()


class Idle(Exception):
    """The draft worker would wait."""


class VirtualDrafter:
    """A draft worker, `way` seconds from the orchestrator, held to its own latency.

    What a forward takes passes for it alone: it looks for news only between two, and what it says leaves when it ends.
    """

    def __init__(self, name: str, world: World, machine: Machine, texts: Texts, deliver: Deliver) -> None:
        self.name, self.model, self.inbox = name, machine.seed, deque[Message]()
        self.way = machine.profile.link_ms / 1000 + machine.hop
        self._world, self._deliver = world, deliver
        self._scheduled = False
        profile = machine.profile
        script = Script(tuple(texts), profile.acceptance, profile.bonus_ranks, VOCAB, seed=machine.seed)
        pace = Pace(profile.draft, self._nap, world.clock)
        drafter = PacedDrafter(ReplayDrafter(script), profile.name, pace, world.clock)
        self._worker = DraftWorker(self, drafter, POLICIES[machine.fan_out])

    def hear(self, message: Message) -> None:
        """Sent now, it arrives after its way."""
        self._world.after(self.way, lambda: self._arrived(message))

    def send(self, message: Message) -> None:
        self._world.after(self.way, lambda: self._deliver(self.name, message))

    def receive(self, wait: bool) -> Message | None:
        if wait and not self.inbox:
            raise Idle
        return self.inbox.popleft() if self.inbox else None

    def expect(self, milliseconds: float) -> None:
        """Nobody watches."""

    def _arrived(self, message: Message) -> None:
        self.inbox.append(message)
        self._wake(0.0)

    def _wake(self, seconds: float) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._world.after(seconds, self._turn)

    def _turn(self) -> None:
        self._scheduled, began = False, self._world.now
        with suppress(Idle):
            self._worker.turn()
            self._wake(0.0)
        self._world.now = began

    def _nap(self, seconds: float) -> None:
        self._world.now += seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a drafter runs. Drafters with one `seed` are one model: they err in the same places."""

    profile: Profile
    hop: float = 0.0
    fan_out: str = "best-first"
    seed: int = 0


@dataclass
class Playing:
    """A request on the target: `next` is what it verifies next, None while it waits for word."""

    text: tuple[int, ...]
    next: Verify | None = None
    prepared: Prepare | None = None
    going_on: bool = False
    over: bool = False
    answered_ns: int = 0
    idle_ns: int = 0


class PacedTarget:
    """Verifies against known texts, all that can go on in one forward, which takes as long as the profile says for all
    its rows; messages arrive by `hear`, answers go to `answer`."""

    def __init__(self, world: World, profile: Profile, hop: float, answer: Callable[[Outcome], None]) -> None:
        self._world, self._profile, self._hop, self._answer = world, profile, hop, answer
        self._playing: dict[str, Playing] = {}
        self._flying = False

    def hear(self, text: tuple[int, ...], message: Message) -> None:
        playing = self._playing.get(getattr(message, "request", ""))
        match message:
            case Open():
                self._playing[message.request] = opened = Playing(text)
                at = len(message.tokens)
                self._say(opened, Outcome(message.request, message.epoch, message.round, at, 0, text[at], Span(0, 1)))
            case Close() if playing:
                playing.over = True
                del self._playing[message.request]
            case Prepare() if playing:
                playing.prepared = message
            case Halt() if playing:
                playing.going_on = False
            case Verify() if playing:
                playing.next, playing.going_on = message, message.going_on
                playing.idle_ns = self._world.now_ns() - playing.answered_ns
                self._begin()

    def _begin(self) -> None:
        """A forward over all that can go on, once nobody's word is awaited any more."""
        members = [playing for playing in self._playing.values() if playing.next]
        if self._flying or not members:
            return
        now_ns = self._world.now_ns()
        missing = [playing.answered_ns for playing in self._playing.values() if not playing.next]
        late_ns = max(missing, default=0) + int(GRACE * 1e9) - now_ns
        if missing and late_ns > 0:
            self._world.after(late_ns / 1e9, self._begin, last=True)
            return
        asked = [(playing, playing.next) for playing in members if playing.next]
        rows = sum(1 + len(verify.chain) for _, verify in asked)
        self._flying = True
        self._world.after(self._profile.target.milliseconds(rows) / 1000, lambda: self._end(asked, rows, now_ns))

    def _end(self, asked: Sequence[tuple[Playing, Verify]], rows: int, started_ns: int) -> None:
        """The outcomes, and what goes on by itself, plainly or by a prepared branch."""
        self._flying = False
        for playing, verify in asked:
            if playing.over:
                continue
            outcome = self._outcome(playing, verify, rows, Span(started_ns, self._world.now_ns()))
            playing.next, playing.idle_ns = None, 0
            self._say(playing, outcome)
            if outcome.onward is not None:
                at = outcome.base_len + outcome.accepted + 1
                following = Verify(verify.request, verify.epoch, verify.round + 1, at, outcome.onward)
                playing.next = replace(following, parents=outcome.onward_parents)
        self._begin()

    def _outcome(self, playing: Playing, verify: Verify, rows: int, work: Span) -> Outcome:
        text, at = playing.text, verify.base_len
        nodes = held(text, verify)
        bonus = text[at + len(nodes)] if at + len(nodes) < len(text) else 0
        committed = (*(verify.chain[node] for node in nodes), bonus)
        onward, parents = ((), ()) if playing.going_on else self._onward(playing, verify, committed) or (None, ())
        return Outcome(
            verify.request, verify.epoch, verify.round, at, len(nodes), bonus, work, playing.idle_ns, onward, rows,
            path=path_of(nodes), onward_parents=parents,
        )  # fmt: skip

    def _onward(
        self, playing: Playing, verify: Verify, committed: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        prepared = playing.prepared
        return prepared.chain(committed) if prepared is not None and prepared.round == verify.round else None

    def _say(self, playing: Playing, outcome: Outcome) -> None:
        playing.answered_ns = self._world.now_ns()
        self._world.after(self._hop, lambda: self._answer(outcome), last=True)


class VirtualCluster(HonestWorkers):
    """Runs requests, one after the other or together; what one taught serves the next."""

    target_context = 1 << 20
    target_abilities = Abilities()

    def __init__(
        self,
        profile: Profile,
        texts: Sequence[tuple[int, ...]],
        *,
        depth: int,
        branches: int,
        fan_out: str = "best-first",
        full_depth: bool = False,
        ngrams: bool = False,
        hop_ms: float = 0.0,
        tunings: Sequence[Tuning] = (),
        memory: Sequence[Tuning] = (),
        others: Sequence[Machine] = (),
    ) -> None:
        """`others`: further drafters."""
        self.world = World()
        self._profile, self._hop = profile, hop_ms / 1000
        self._texts: dict[str, tuple[int, ...]] = {}
        self._told: list[ToFront] = []
        self._target = PacedTarget(self.world, profile, self._hop, lambda outcome: self._handle("target-0", outcome))
        machines = [Machine(profile, self._hop, fan_out), *others]
        self._drafters = {
            name: VirtualDrafter(name, self.world, machine, texts, self._handle)
            for name, machine in zip((f"draft-{n}" for n in range(len(machines))), machines, strict=True)
        }
        settings = RoundSettings(depth, branches, full_depth, ngrams, simulated=True)
        self.rounds = Rounds(self, settings, self._told.append, Trace(None), tunings, memory)

    # --- what the rounds see --------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        return []

    def is_target(self, name: str) -> bool:
        return name == "target-0"

    def model(self, name: str) -> object:
        return self._drafters[name].model

    def drafters(self) -> set[str]:
        return set(self._drafters)

    def send_target(self, message: Message) -> None:
        text = self._texts.get(getattr(message, "request", ""), ())
        self.world.after(self._hop, lambda: self._target.hear(text, message))

    def let_go(self) -> None:
        """Messages leave by the virtual clock."""

    def send_drafter(self, name: str, message: Message) -> None:
        self._drafters[name].hear(message)

    # --- what a caller sees ---------------------------------------------------------------------------------------

    def run(self, text: tuple[int, ...], max_tokens: int, mode: str) -> Timings:
        """Generates `max_tokens` of `text` after its first `PROMPT_TOKENS`. Raises as `together`."""
        return self.together([text], max_tokens, mode)[0]

    def together(self, texts: Sequence[tuple[int, ...]], max_tokens: int, mode: str) -> list[Timings]:
        """The same for all texts at once, which begin at the same time.

        Raises:
            InvalidRequest: a text is too short for that.
            WorkerError: the tokens are not the text's, or a request did not end well.
        """
        needed, shortest = PROMPT_TOKENS + max_tokens + 1, min(map(len, texts))
        if shortest < needed:
            raise InvalidRequest(f"the text has {shortest} tokens; expected {needed} or more")
        begun = len(self._told)
        requests = {f"r{begun}-{number}": text for number, text in enumerate(texts)}
        self._texts.update(requests)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        with self._virtual_clock():
            for request, text in requests.items():
                admit = Admit(request, text[:PROMPT_TOKENS], sampling, mode, frozenset())
                self.rounds.begin(admit, self.world.now_ns())
            while not self.world.idle:
                self.world.step()
        return [self._ended(request, text, max_tokens, self._told[begun:]) for request, text in requests.items()]

    def _ended(self, request: str, text: Sequence[int], max_tokens: int, told: Sequence[ToFront]) -> Timings:
        mine = [event for event in told if getattr(event, "request", "") == request]
        if not isinstance(mine[-1], Ended):
            raise WorkerError(f"the simulated request did not end well: {mine[-1]}")
        said = tuple(token for event in mine if isinstance(event, Committed) for token in event.tokens)
        if said != text[PROMPT_TOKENS : PROMPT_TOKENS + max_tokens]:
            raise WorkerError("the simulated request did not say what its text says")
        return mine[-1].timings

    def _handle(self, sender: str, message: Message) -> None:
        self.rounds.handle(sender, message, self.world.now_ns())
        self._watch_deadline()

    def _watch_deadline(self) -> None:
        deadline_ns = self.rounds.next_deadline_ns()
        if deadline_ns is not None:
            left = max(deadline_ns / 1e9 - self.world.now, 0.0) + 1e-9
            self.world.after(left, lambda: self.rounds.on_time(self.world.now_ns()), last=True)

    @contextmanager
    def _virtual_clock(self) -> Iterator[None]:
        """Spans of the workers are of this world."""
        real, clock.now = clock.now, self.world.now_ns
        try:
            yield
        finally:
            clock.now = real
