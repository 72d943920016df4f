"""Checks a cluster's invariants (docs/architecture.md, "Invariants") while it runs, by every message and event.

`HOLDS` names the checks. Each counts how often it had something to judge, so that a test can see that none is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from outrider.draft_worker.worker import DraftWorker
from outrider.engine.loading import LoadedModel
from outrider.orchestrator.core.request import PreparedKey
from outrider.orchestrator.core.scheduler import FAIL_AFTER_DEATHS, Scheduler
from outrider.orchestrator.events import (
    Admit,
    Committed,
    RequestBegan,
    RequestEnded,
    ToFront,
)
from outrider.protocol.codec import encode
from outrider.protocol.messages import (
    Branches,
    Commit,
    Done,
    Drafted,
    Failed,
    Fault,
    Message,
    Open,
    Outcome,
    Prepare,
    Progress,
    Span,
    Verify,
)
from outrider.protocol.schema import Origin
from outrider.target_worker.worker import TargetWorker
from tests.columns import column_tokens
from tests.network.truth import FreshDrafter, Text

HOLDS = {
    "text": "each token is the target's own, on every path and after every fault",
    "once": "no token is reported twice or after the end, and a request ends once",
    "end": "a request ends where the target's text ends, with the right reason",
    "place": "messages carry request, epoch, round and base_len, which never decrease",
    "stale": "an outcome that was handled before changes nothing and is counted",
    "announced": "the target verifies only what it was asked to, or has announced",
    "served": "a served chain arrived for its outcome, before that outcome",
    "fresh": "a drafter proposes what a fresh one would propose there",
    "columns": "a worker's rows are those of the committed tokens",
    "memory": "running and cached texts stay within their memory",
    "failures": "no worker reports a failure",
    "honest": "no message of an honest drafter counts as invalid, however late or often it arrives",
    "times": "every time is of evaluated work, on one clock",
    "books": "the counts of a request agree with each other and with its tokens, and can be encoded",
    "lives": "no drafter, death of the target, pause or lost message ends a request; many deaths do, with the reason",
    "over": "every request ends after the faults have ended",
    "given back": "what ended requests held is freed",
}


class Violation(AssertionError):
    """An invariant is violated."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {HOLDS[name]}; but {why}")


@dataclass(slots=True)
class Watched:
    """A request: the events about it, and the place of its latest message."""

    admit: Admit
    text: Text
    tokens: list[int] = field(default_factory=list)
    began: bool = False
    ending: ToFront | None = None
    stopped: str = ""
    place: tuple[int, int] = (0, 0)
    deaths: int = 0
    asked: set[tuple[int, int]] = field(default_factory=set)
    prepared: set[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    @property
    def expected(self) -> list[int]:
        """All its tokens, without faults."""
        prompt, most = len(self.admit.tokens), self.admit.sampling.max_tokens
        whole = self.text.first(prompt + most)[prompt:]
        ends = [at for at, token in enumerate(whole) if token in self.admit.eos]
        return whole[: ends[0] + 1] if ends else whole


class Watch:
    """Checks every message and event of one cluster. Raises Violation."""

    rounds: Scheduler

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        clock: Callable[[], int],
        others: Mapping[str, LoadedModel] = MappingProxyType({}),
    ) -> None:
        """`others`: the drafters that do not run `draft`."""
        self.judged: Counter[str] = Counter()
        self.requests: dict[str, Watched] = {}
        self._target, self._clock = target, clock
        self._fresh = FreshDrafter(draft)
        self._others = {name: FreshDrafter(model) for name, model in others.items()}
        self._taken: set[tuple[str, int, int]] = set()
        self._count_before: dict[str, int] = {}
        self._stale_before, self._again = 0, False

    def on_received(self, name: str, message: Message) -> None:
        """Records that a worker has received a message."""
        watched = self.requests.get(getattr(message, "request", None) or "")
        if watched is not None and isinstance(message, Open | Verify):
            watched.asked.add((message.epoch, message.round))

    # --- what happens to requests ---------------------------------------------------------------------------------

    def on_begin(self, admit: Admit) -> None:
        self.requests[admit.request] = Watched(admit, Text(self._target, admit.tokens, admit.sampling))

    def on_stop(self, request: str, reason: str) -> None:
        if self.requests[request].ending is None:
            self.requests[request].stopped = reason

    def on_target_lost(self) -> None:
        for watched in self.requests.values():
            watched.deaths += watched.ending is None

    # --- events for the front -------------------------------------------------------------------------------------

    def on_event(self, event: ToFront) -> None:
        watched = self.requests[event.request]  # type: ignore[union-attr]
        match event:
            case RequestBegan():
                self.judge("once", not watched.began, f"{event.request} began twice")
                watched.began = True
            case Committed():
                self._committed(watched, event)
            case RequestEnded() | Failed():
                self.judge("once", watched.ending is None, f"{event.request} ended twice: {watched.ending}, {event}")
                watched.ending = event
                self._ended(watched, event)
            case Progress():
                self.judge("once", watched.ending is None, f"{event} came after the end")

    def _committed(self, watched: Watched, event: Committed) -> None:
        name, expected = event.request, watched.expected
        self.judge("once", watched.began and watched.ending is None, f"{name} got {event.tokens} out of turn")
        watched.tokens += event.tokens
        watched.deaths = 0
        tokens, excess = watched.tokens, len(watched.tokens) - len(expected)
        self.judge("once", excess <= 0, f"{name} got {excess} tokens past its end")
        self.judge("text", tokens == expected[: len(tokens)], f"{name} got {tokens}, not {expected[: len(tokens)]}")

    def _ended(self, watched: Watched, event: RequestEnded | Failed) -> None:
        name = event.request
        died_of_it = isinstance(event, Failed) and watched.deaths >= FAIL_AFTER_DEATHS and event.message
        self.judge("lives", isinstance(event, RequestEnded) or bool(died_of_it), f"{name} broke: {event}")
        if isinstance(event, Failed):
            return
        if event.reason == watched.stopped:
            self.judged["end"] += 1
        else:
            expected = watched.expected
            reason = "eos" if expected[-1] in watched.admit.eos else "length"
            holds = watched.tokens == expected and event.reason == reason
            ended = f"{name} ended by {event.reason} after {watched.tokens}"
            self.judge("end", holds, f"{ended}, not {reason} after {expected}")
        self._books(watched, event)

    def _books(self, watched: Watched, event: RequestEnded) -> None:
        times, name = event.timings, event.request
        self.judge("books", times.predicted_n == len(watched.tokens), f"{name}: {times.predicted_n} tokens are counted")
        prompt = len(watched.admit.tokens)
        self.judge("books", times.prompt_n + times.cache_n == prompt, f"{name}: of {prompt} prompt tokens {times}")
        followed = times.cache_late + times.missed_then_plain + times.missed_then_copied + times.missed_then_drafted
        self.judge("books", followed == times.cache_misses, f"{name}: {times.cache_misses} misses, not {followed}")
        self.judge("books", times.draft_n_accepted <= min(times.draft_n, times.predicted_n), f"{name}: {times}")
        numbers = [value for key in times.__struct_fields__ if isinstance(value := getattr(times, key), int | float)]
        self.judge("books", min(numbers) >= 0, f"{name}: a number is negative: {times}")
        encode(Done(name, event.reason, replace(times, queue_ms=0.0), event.notes))

    # --- messages of the orchestrator -----------------------------------------------------------------------------

    def on_sent(self, message: Message) -> None:
        """Checks a message to a worker before the network carries it."""
        watched = self.requests.get(getattr(message, "request", ""))
        if watched is None or not isinstance(message, Open | Verify | Prepare | Commit):
            return
        known = self.rounds._requests[message.request].sequence.tokens
        base_len = len(message.tokens) if isinstance(message, Open) else message.base_len
        ahead = isinstance(message, Commit) and message.verifying is None
        place = (message.epoch, message.round - ahead)
        self.judge("place", place >= watched.place, f"{message} goes back behind {watched.place}")
        watched.place = place
        self.judge("place", base_len == len(known), f"{message} is about {len(known)} tokens")
        self.judge("place", known == watched.text.first(base_len), f"{message} is about {known}")
        if isinstance(message, Verify):
            self._served(watched, message)
        if isinstance(message, Prepare):
            for committed, chain, parents in zip_longest(
                message.committed, message.chains, message.parents, fillvalue=()
            ):
                self._from_cache(watched, message, (committed, chain, parents))

    def _served(self, watched: Watched, message: Verify) -> None:
        request = self.rounds._requests[message.request]
        proposal = request.round.proposal
        if proposal.source is Origin.PREPARED:
            chain = tuple(proposal.chain[node] for node in proposal.drafter_nodes)
            place, tokens = (message.epoch, message.round - 1), tuple(request.sequence.tokens)
            held = any(
                key[:2] == place and key[3] == tokens[key[2] :] and key[4][: len(chain)] == chain
                for key in watched.prepared
            )
            self.judge("served", held, f"no drafter prepared {message} for {place}")

    def _from_cache(self, watched: Watched, message: Prepare, key: PreparedKey) -> None:
        committed, chain, _ = key
        proposal = self.rounds._requests[message.request].round.prepared[key]
        own = tuple(proposal.chain[node] for node in proposal.drafter_nodes)
        place = (message.epoch, message.round, message.base_len, committed)
        held = any(key[:4] == place and key[4][: len(own)] == own for key in watched.prepared)
        self.judge("served", held, f"{message}: no drafter prepared {chain} for {place}")

    # --- messages of workers --------------------------------------------------------------------------------------

    def on_worker_message(self, name: str, message: Message) -> None:
        """Checks a message of a worker before the network carries it."""
        watched = self.requests.get(getattr(message, "request", None) or "")
        match message:
            case Fault():
                self.judge("failures", False, f"{name} reports {message}")
            case Branches() if watched is not None:
                self._span(name, message.work)
                for entry in message.entries:
                    self._is_fresh(name, watched, message.base_len, entry.committed, entry.chain)
            case Drafted() if watched is not None:
                self._span(name, message.work)
                self._is_fresh(name, watched, message.base_len, (), message.chain)
            case Outcome() if watched is not None:
                self._span(name, message.work)
                self.judge("announced", (message.epoch, message.round) in watched.asked, f"{message} was not asked for")
                if message.next_proposal is not None:
                    watched.asked.add((message.epoch, message.round + 1))
        self.judged["failures"] += 1

    def _is_fresh(
        self, name: str, watched: Watched, base_len: int, committed: tuple[int, ...], chain: tuple[int, ...]
    ) -> None:
        text = [*watched.text.first(base_len), *committed]
        fresh = self._others.get(name, self._fresh).propose(text, len(chain), watched.admit.sampling)
        self.judge("fresh", list(chain) == fresh, f"{watched.admit.request}: {chain}, not {fresh} after {text}")

    def _span(self, name: str, work: Span) -> None:
        self.judge("times", 0 < work.started_ns <= work.ended_ns <= self._clock(), f"{name} worked {work}")

    # --- messages that the orchestrator handles -------------------------------------------------------------------

    def has_repeats(self, messages: Sequence[Message]) -> bool:
        """Returns whether one of these outcomes was handled before, or occurs twice."""
        keys = [_key(message) for message in messages if isinstance(message, Outcome)]
        return len(set(keys)) < len(keys) or not self._taken.isdisjoint(keys)

    def before_messages(self, messages: Sequence[Message]) -> None:
        """Records the state before the scheduler handles these messages."""
        self._stale_before, self._again = self.rounds.stale, self.has_repeats(messages)
        self._count_before = {name: len(watched.tokens) for name, watched in self.requests.items()}
        for message in messages:
            watched = self.requests.get(getattr(message, "request", None) or "")
            if isinstance(message, Branches) and watched is not None:
                place = (message.epoch, message.round, message.base_len)
                watched.prepared |= {(*place, entry.committed, entry.chain) for entry in message.entries}

    def on_messages(self, messages: Sequence[Message]) -> None:
        """Checks the state after the scheduler has handled these messages."""
        if self._again:
            self.judge("stale", self.rounds.stale == self._stale_before + 1, f"{messages} counts again")
        for message in messages:
            if isinstance(message, Outcome) and message.request in self.requests:
                watched = self.requests[message.request]
                at = message.base_len - len(watched.admit.tokens)
                if self._count_before[message.request] <= at < len(watched.tokens):
                    self._taken.add(_key(message))

    # --- the state of workers -------------------------------------------------------------------------------------

    def check_worker(self, worker: TargetWorker | DraftWorker) -> None:
        """Checks the state of a worker after its turns."""
        if isinstance(worker, TargetWorker):
            self._check_target(worker)
        else:
            self._check_drafter(worker)

    def _check_target(self, worker: Any) -> None:
        running, texts, cache = worker._running, worker._kv_cache._sequences, worker._prefixes.cache
        for name, one in running.items():
            self._check_committed(name, one.slot.tokens)
            for part in one._drafting.values():
                self._check_committed(name, column_tokens(part._work.tree) if part._work is not None else [])
            fed = one.slot.fed - worker.runner.is_verifying(one)  # a step may be under way behind one that is not read
            self.judge("columns", fed < len(one.slot.tokens), f"{name}: {fed} of {one.slot.tokens} are fed")
        self.judge("memory", len(texts) == len(running), f"{len(texts)} texts are held for {len(running)} requests")
        self._check_memory(cache, len(running))

    def _check_drafter(self, worker: Any) -> None:
        for name, one in worker._running.items():
            self._check_committed(name, column_tokens(one.work.tree))
        begun = [one for one in worker._running.values() if one.work.tree.committed_len]
        self._check_memory(worker._drafter.prompt_cache, len(begun))

    def _check_committed(self, name: str, tokens: Sequence[int]) -> None:
        expected = self.requests[name].text.first(len(tokens))
        self.judge("columns", list(tokens) == expected[: len(tokens)], f"{name}: {tokens}, not {expected}")

    def _check_memory(self, cache: Any, running: int) -> None:
        use = cache.use
        self.judge("memory", use.bytes <= cache._limit, f"{use.bytes} bytes are cached in {cache._limit}")
        self.judge("memory", len(cache._running) == running, f"{len(cache._running)} texts for {running} requests")

    def judge(self, name: str, holds: bool, why: str) -> None:
        """Counts a check. Raises Violation unless it holds."""
        self.judged[name] += 1
        if not holds:
            raise Violation(name, why)


def _key(outcome: Outcome) -> tuple[str, int, int]:
    return outcome.request, outcome.epoch, outcome.round
