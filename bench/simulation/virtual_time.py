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
from dataclasses import dataclass, field

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
from outrider.protocol.messages import Halt, Message, Open, Outcome, Prepare, Span, Timings, Verify
from outrider.protocol.profile import Profile
from outrider.protocol.sampling import SamplingParams

VOCAB = 4096
PROMPT_TOKENS = 8


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

    def nap(self, seconds: float) -> None:
        """Lets this much time pass and everything in it happen."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.step()
        self.now = end


class Quiet(Exception):
    """The draft worker waits and nothing will happen any more."""


@dataclass
class VirtualLink:
    """The draft worker's link."""

    world: World
    way: float
    deliver: Callable[[Message], None]
    name: str = "draft-0"
    inbox: deque[Message] = field(default_factory=deque)

    def send(self, message: Message) -> None:
        self.world.after(self.way, lambda: self.deliver(message))

    def receive(self, wait: bool) -> Message | None:
        self.world.nap(0.0)
        while wait and not self.inbox:
            if self.world.idle:
                raise Quiet
            self.world.step()
        return self.inbox.popleft() if self.inbox else None


class PacedTarget:
    """Verifies against known texts, as long as the profile says; messages arrive by `hear`, answers go to `answer`."""

    def __init__(self, world: World, profile: Profile, hop: float, answer: Callable[[Outcome], None]) -> None:
        self._world, self._profile, self._hop, self._answer = world, profile, hop, answer
        self._texts: dict[str, tuple[int, ...]] = {}
        self._prepared: Prepare | None = None
        self._going_on = False
        self._order = 0
        self._sent_ns = 0

    def hear(self, text: tuple[int, ...], message: Message) -> None:
        match message:
            case Prepare():
                self._prepared = message
            case Halt():
                self._going_on = False
            case Open():
                self._order += 1
                self._texts[message.request] = text
                at = len(message.tokens)
                self._say(Outcome(message.request, message.epoch, message.round, at, 0, text[at], Span(0, 1)))
            case Verify():
                self._order, self._going_on = self._order + 1, message.going_on
                self._forward(message, self._order, self._world.now_ns() - self._sent_ns)
            case _:
                self._order += 1

    def _forward(self, message: Verify, order: int, idle_ns: int) -> None:
        """One forward, and after it the next one, plain or of a prepared branch, that it may go on with."""
        started_ns = self._world.now_ns()

        def end() -> None:
            if order != self._order:  # another message came meanwhile
                return
            outcome = self._outcome(message, Span(started_ns, self._world.now_ns()), idle_ns)
            self._say(outcome)
            if outcome.onward is not None:
                at = outcome.base_len + outcome.accepted + 1
                following = Verify(message.request, message.epoch, message.round + 1, at, outcome.onward)
                self._forward(following, order, 0)

        self._world.after(self._profile.target.milliseconds(1 + len(message.chain)) / 1000, end)

    def _outcome(self, message: Verify, work: Span, idle_ns: int) -> Outcome:
        text, at = self._texts[message.request], message.base_len
        pairs = zip(message.chain, text[at:], strict=False)
        accepted = next((i for i, (own, true) in enumerate(pairs) if own != true), len(message.chain))
        bonus = text[at + accepted] if at + accepted < len(text) else 0
        onward = () if self._going_on else self._onward(message, (*message.chain[:accepted], bonus))
        return Outcome(message.request, message.epoch, message.round, at, accepted, bonus, work, idle_ns, onward)

    def _onward(self, message: Verify, committed: tuple[int, ...]) -> tuple[int, ...] | None:
        prepared = self._prepared
        if prepared is None or (prepared.request, prepared.round) != (message.request, message.round):
            return None
        return prepared.chain(committed)

    def _say(self, outcome: Outcome) -> None:
        self._sent_ns = self._world.now_ns()
        self._world.after(self._hop, lambda: self._answer(outcome), last=True)


class VirtualCluster:
    """Runs one request after another; what one taught serves the next."""

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
    ) -> None:
        self.world = World()
        self._profile, self._hop = profile, hop_ms / 1000
        self._text: tuple[int, ...] = ()
        self._told: list[ToFront] = []
        self._target = PacedTarget(self.world, profile, self._hop, lambda outcome: self._handle("target-0", outcome))
        way = profile.link_ms / 1000 + self._hop
        self._link = VirtualLink(self.world, way, lambda message: self._handle("draft-0", message))
        script = Script(tuple(texts), profile.acceptance, profile.bonus_ranks, VOCAB)
        pace = Pace(profile.draft, self.world.nap, self.world.clock)
        drafter = PacedDrafter(ReplayDrafter(script), profile.name, pace, self.world.clock)
        self._drafter = DraftWorker(self._link, drafter, POLICIES[fan_out])
        settings = RoundSettings(depth, branches, full_depth, ngrams, simulated=True)
        self.rounds = Rounds(self, settings, self._told.append, Trace(None), tunings)

    # --- what the rounds see --------------------------------------------------------------------------------------

    def notes(self) -> list[str]:
        return []

    def is_target(self, name: str) -> bool:
        return name == "target-0"

    def drafters(self) -> set[str]:
        return {"draft-0"}

    def send_target(self, message: Message) -> None:
        text = self._text
        self.world.after(self._hop, lambda: self._target.hear(text, message))

    def let_go(self) -> None:
        """Messages leave by the virtual clock."""

    def send_drafter(self, name: str, message: Message) -> None:
        self.world.after(self._link.way, lambda: self._link.inbox.append(message))

    # --- what a caller sees ---------------------------------------------------------------------------------------

    def run(self, text: tuple[int, ...], max_tokens: int, mode: str) -> Timings:
        """Generates `max_tokens` of `text` after its first `PROMPT_TOKENS`.

        Raises:
            InvalidRequest: the text is too short for that.
            WorkerError: the tokens are not the text's, or the request did not end well.
        """
        if len(text) < PROMPT_TOKENS + max_tokens + 1:
            raise InvalidRequest(f"the text has {len(text)} tokens; expected {PROMPT_TOKENS + max_tokens + 1} or more")
        self._text, begun = text, len(self._told)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = f"r{begun}"
        with self._virtual_clock():
            self.rounds.begin(
                Admit(request, text[:PROMPT_TOKENS], sampling, mode, frozenset()), self.world.now_ns()
            )
            with suppress(Quiet):
                while True:
                    self._drafter.turn()
        told = self._told[begun:]
        said = tuple(token for event in told if isinstance(event, Committed) for token in event.tokens)
        if not isinstance(told[-1], Ended):
            raise WorkerError(f"the simulated request did not end well: {told[-1]}")
        if said != text[PROMPT_TOKENS : PROMPT_TOKENS + max_tokens]:
            raise WorkerError("the simulated request did not say what its text says")
        return told[-1].timings

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
