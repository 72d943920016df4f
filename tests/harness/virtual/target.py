"""A target in virtual time: verifies against known texts, all requests that can continue in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.engine.kv_cache import PREFILL_CHUNK_TOKENS
from outrider.protocol.messages import (
    Close,
    DraftTokens,
    Halt,
    Message,
    Open,
    Outcome,
    Prefilled,
    Prepare,
    Span,
    Verify,
)
from outrider.target_worker.model_runner import MIN_CHUNK_TOKENS, READING_SHARE, READING_SHARE_WITH_CHAINS
from tests.harness.virtual.known_text import held, path_of
from tests.harness.virtual.remembered import Remembered
from tests.harness.virtual.world import World
from tools.simulation.profile import Profile

# Seconds that the target waits for messages about requests that can't continue by themselves.
GRACE = 0.001


@dataclass
class Playing:
    """A request on the target. `next`: the next VERIFY, None while it waits for one. `unread`: prompt tokens to read.
    `length`: tokens of the text so far."""

    text: tuple[int, ...]
    opened: Open
    unread: int = 0
    length: int = 0
    next: Verify | None = None
    prepared: Prepare | None = None
    autonomous: bool = False
    over: bool = False
    answered_ns: int = 0


@dataclass(frozen=True, slots=True)
class Flight:
    """A forward: the requests verified in `rows`, and the pieces of prompts that are read."""

    asked: Sequence[tuple[Playing, Verify]]
    read: Sequence[tuple[Playing, int]]
    rows: int
    started_ns: int

    @property
    def all_rows(self) -> int:
        """All rows, including those of prompts."""
        return self.rows + sum(count for _, count in self.read)


class PacedTarget:
    """A target with a profile's times. A forward takes the profile's time for its rows, and `prompt_ms` for each prompt
    token that it reads; pieces of prompts are distributed as in the target worker. `receive` takes a message,
    `answer` gets the answers. Counts `busy` seconds, `forwards` and their `rows`."""

    def __init__(
        self,
        world: World,
        profile: Profile,
        hop: float,
        answer: Callable[[Message], None],
        prompt_ms: float = 0.0,
        remembered: Remembered | None = None,
    ) -> None:
        self.busy, self.forwards, self.rows = 0.0, 0, 0
        self._world, self._profile, self._hop, self._answer = world, profile, hop, answer
        self._prompt_ms = prompt_ms
        self._remembered = remembered or Remembered(0)
        self._playing: dict[str, Playing] = {}
        self._flying = False

    def receive(self, text: tuple[int, ...], message: Message) -> None:
        playing = self._playing.get(getattr(message, "request", ""))
        match message:
            case Open():
                self._open(text, message)
            case Close() if playing:
                playing.over = True
                self._remembered.keep(playing.text[: playing.length])
                del self._playing[message.request]
            case Prepare() if playing:
                playing.prepared = message
            case Halt() if playing:
                playing.autonomous = False
            case Verify() if playing:
                playing.next, playing.autonomous = message, message.autonomous
                self._begin()

    def end(self) -> None:
        """Stops the target."""
        for playing in self._playing.values():
            playing.over = True
        self._playing.clear()

    def _open(self, text: tuple[int, ...], message: Open) -> None:
        self._playing[message.request] = opened = Playing(text, message)
        if not self._prompt_ms:
            self._opened(opened, Span(0, 1))
            return
        known = self._remembered.find(text[: len(message.tokens)])
        opened.unread = len(message.tokens) - known
        self._say(opened, Prefilled(message.request, message.epoch, known, len(message.tokens), known))
        self._begin()

    def _opened(self, playing: Playing, work: Span) -> None:
        """Handles a request with a completely read prompt."""
        message, at = playing.opened, len(playing.opened.tokens)
        playing.length = at
        self._say(playing, Outcome(message.request, message.epoch, message.round, at, 0, playing.text[at], work))

    def _begin(self) -> None:
        """Begins a forward over all requests that can continue, unless messages are awaited."""
        members = [playing for playing in self._playing.values() if playing.next]
        readers = [playing for playing in self._playing.values() if playing.unread]
        if self._flying or not (members or readers):
            return
        now_ns = self._world.now_ns()
        awaited = [playing for playing in self._playing.values() if not playing.next and not playing.unread]
        late_ns = max((playing.answered_ns for playing in awaited), default=0) + int(GRACE * 1e9) - now_ns
        if awaited and late_ns > 0:
            self._world.after(late_ns / 1e9, self._begin, last=True)
            return
        asked = [(playing, playing.next) for playing in members if playing.next]
        rows = sum(1 + len(verify.chain) for _, verify in asked)
        flight = Flight(asked, self._pieces(readers, rows, len(members) + len(awaited)), rows, now_ns)
        self._flying = True
        seconds = self._milliseconds(flight) / 1000
        self.busy += seconds
        self.forwards += 1
        self.rows += rows
        self._world.after(seconds, lambda: self._end(flight))

    def _pieces(self, readers: Sequence[Playing], rows: int, decoding: int) -> list[tuple[Playing, int]]:
        """Returns the next pieces of prompts in order of arrival, by the rule of `target_worker.model_runner`."""
        room, found = PREFILL_CHUNK_TOKENS, []
        if len(readers) <= decoding:
            share = READING_SHARE_WITH_CHAINS if rows > decoding else READING_SHARE
            beside_ms = self._profile.target(max(rows, decoding))
            fits = share * len(readers) * beside_ms / max(self._prompt_ms, 1e-9)
            room = int(min(max(fits, MIN_CHUNK_TOKENS), PREFILL_CHUNK_TOKENS))
        for playing in readers:
            count = min(playing.unread, room)
            if count:
                found.append((playing, count))
                room -= count
        return found

    def _milliseconds(self, flight: Flight) -> float:
        read_ms = self._prompt_ms * sum(count for _, count in flight.read)
        if not flight.rows:
            return max(read_ms, self._profile.target(1))
        return self._profile.target(flight.rows) + read_ms

    def _end(self, flight: Flight) -> None:
        """Sends the outcomes, and continues requests that need no message: plain ones, and prepared branches."""
        self._flying = False
        work = Span(flight.started_ns, self._world.now_ns())
        for playing, verify in flight.asked:
            if playing.over:
                continue
            outcome = self._outcome(playing, verify, flight.all_rows, work)
            playing.next = None
            playing.length = outcome.base_len + outcome.accepted + 1
            self._say(playing, outcome)
            if outcome.next_proposal is not None:
                place = (verify.request, verify.epoch, verify.round + 1, playing.length)
                playing.next = Verify(*place, outcome.next_proposal)
        for playing, count in flight.read:
            if not playing.over:
                self._read(playing, count, work)
        self._begin()

    def _read(self, playing: Playing, count: int, work: Span) -> None:
        playing.unread -= count
        total = len(playing.opened.tokens)
        if playing.unread:
            self._say(playing, Prefilled(playing.opened.request, playing.opened.epoch, total - playing.unread, total))
        else:
            self._opened(playing, work)

    def _outcome(self, playing: Playing, verify: Verify, rows: int, work: Span) -> Outcome:
        text, at = playing.text, verify.base_len
        nodes = held(text, verify)
        bonus = text[at + len(nodes)] if at + len(nodes) < len(text) else 0
        committed = (*(verify.chain[node] for node in nodes), bonus)
        next_proposal = DraftTokens() if playing.autonomous else self._next_proposal(playing, verify, committed)
        return Outcome(
            verify.request,
            verify.epoch,
            verify.round,
            at,
            len(nodes),
            bonus,
            work,
            work.started_ns - playing.answered_ns,
            next_proposal,
            rows,
            path=path_of(nodes),
        )

    def _next_proposal(self, playing: Playing, verify: Verify, committed: tuple[int, ...]) -> DraftTokens | None:
        prepared = playing.prepared
        return prepared.proposal(committed) if prepared is not None and prepared.round == verify.round else None

    def _say(self, playing: Playing, message: Outcome | Prefilled) -> None:
        playing.answered_ns = self._world.now_ns()
        self._world.after(self._hop, lambda: self._answer(message), last=True)
