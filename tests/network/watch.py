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
from outrider.orchestrator.core.proposal import ProposalSource
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
from outrider.target_worker.worker import TargetWorker
from tests.network.truth import FreshDrafter, Text
from tests.system.cluster import WatchedDrafter

HOLDS = {
    "text": "each token is the target's own, on every path, whatever was lost, late, twice, altered or dead",
    "once": "no token is told twice, none after the end, and a request ends once",
    "end": "a request ends where the target's text ends, by the reason it ends by",
    "place": "words carry request, epoch, round and base_len, which never go back",
    "stale": "what was heard before changes nothing and is counted",
    "served": "a served chain came for this place, before its outcome",
    "fresh": "a drafter says what a fresh one would say at that place",
    "columns": "what a worker remembers are the committed tokens",
    "memory": "texts and what ended ones leave stay within their memory",
    "failures": "nothing fails: no fault but those that lies bring",
    "honest": "what a drafter has said is never taken for a lie, however late or often it comes",
    "times": "every time is of work that was done, on one clock",
    "books": "the numbers of a request agree with each other and with its tokens, and can be told",
    "lives": "no drafter's fate, target's death, pause or lost word ends a request; many deaths do, with the reason",
    "over": "when the faults are over every request comes to its end",
    "given back": "what ended requests held is given back",
}


class Violation(AssertionError):
    """Something that always holds does not."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {HOLDS[name]}; but {why}")


@dataclass(slots=True)
class Watched:
    """A request: what it was told, and where its words stand."""

    admit: Admit
    text: Text
    tokens: list[int] = field(default_factory=list)
    began: bool = False
    ending: ToFront | None = None
    stopped: str = ""
    place: tuple[int, int] = (0, 0)
    deaths: int = 0
    prepared: set[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    @property
    def said(self) -> list[int]:
        """What it would say in all, undisturbed."""
        prompt, most = len(self.admit.tokens), self.admit.sampling.max_tokens
        whole = self.text.first(prompt + most)[prompt:]
        ends = [at for at, token in enumerate(whole) if token in self.admit.eos]
        return whole[: ends[0] + 1] if ends else whole


class Watch:
    """Hears of everything in one cluster; raises Violation."""

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
        self.lied = False
        self._target, self._clock = target, clock
        self._fresh = FreshDrafter(draft)
        self._others = {name: FreshDrafter(model) for name, model in others.items()}
        self._taken: set[tuple[str, int, int]] = set()
        self._told_before: dict[str, int] = {}
        self._stale_before, self._again = 0, False

    # --- what happens to requests ---------------------------------------------------------------------------------

    def begins(self, admit: Admit) -> None:
        self.requests[admit.request] = Watched(admit, Text(self._target, admit.tokens, admit.sampling))

    def stops(self, request: str, reason: str) -> None:
        if self.requests[request].ending is None:
            self.requests[request].stopped = reason

    def loses_target(self) -> None:
        for watched in self.requests.values():
            watched.deaths += watched.ending is None

    # --- what is told ---------------------------------------------------------------------------------------------

    def on_hidden_states(self, event: ToFront) -> None:
        watched = self.requests[event.request]  # type: ignore[union-attr]
        match event:
            case RequestBegan():
                self._judge("once", not watched.began, f"{event.request} began twice")
                watched.began = True
            case Committed():
                self._committed(watched, event)
            case RequestEnded() | Failed():
                self._judge("once", watched.ending is None, f"{event.request} ended twice: {watched.ending}, {event}")
                watched.ending = event
                self._ended(watched, event)
            case Progress():
                self._judge("once", watched.ending is None, f"{event} was told after the end")

    def _committed(self, watched: Watched, event: Committed) -> None:
        name, said = event.request, watched.said
        self._judge("once", watched.began and watched.ending is None, f"{name} was told {event.tokens} out of turn")
        watched.tokens += event.tokens
        watched.deaths = 0
        told = watched.tokens
        self._judge("once", len(told) <= len(said), f"{name} was told {len(told) - len(said)} tokens past its end")
        self._judge("text", told == said[: len(told)], f"{name} was told {told}, not {said[: len(told)]}")

    def _ended(self, watched: Watched, event: RequestEnded | Failed) -> None:
        name = event.request
        died_of_it = isinstance(event, Failed) and watched.deaths >= FAIL_AFTER_DEATHS and event.message
        self._judge("lives", isinstance(event, RequestEnded) or bool(died_of_it), f"{name} broke: {event}")
        if isinstance(event, Failed):
            return
        if event.reason == watched.stopped:
            self.judged["end"] += 1
        else:
            said, eos = watched.said, watched.admit.eos
            expected = "eos" if said[-1] in eos else "length"
            whole = watched.tokens == said and event.reason == expected
            self._judge(
                "end", whole, f"{name} ended by {event.reason} after {watched.tokens}, not {expected} after {said}"
            )
        self._books(watched, event)

    def _books(self, watched: Watched, event: RequestEnded) -> None:
        times, name = event.timings, event.request
        self._judge(
            "books", times.predicted_n == len(watched.tokens), f"{name}: {times.predicted_n} tokens are counted"
        )
        prompt = len(watched.admit.tokens)
        self._judge("books", times.prompt_n + times.cache_n == prompt, f"{name}: of {prompt} prompt tokens {times}")
        followed = times.cache_late + times.missed_then_plain + times.missed_then_copied + times.missed_then_drafted
        self._judge("books", followed == times.cache_misses, f"{name}: {times.cache_misses} misses, not {followed}")
        self._judge("books", times.draft_n_accepted <= min(times.draft_n, times.predicted_n), f"{name}: {times}")
        numbers = [value for key in times.__struct_fields__ if isinstance(value := getattr(times, key), int | float)]
        self._judge("books", min(numbers) >= 0, f"{name}: a number is negative: {times}")
        encode(Done(name, event.reason, replace(times, queue_ms=0.0), event.notes))

    # --- what is sent ---------------------------------------------------------------------------------------------

    def sent(self, receiver: str, message: Message) -> None:
        """What the rounds have to say, before the network has it."""
        watched = self.requests.get(getattr(message, "request", ""))
        if watched is None or not isinstance(message, Open | Verify | Prepare | Commit):
            return
        known = self.rounds._requests[message.request].sequence.tokens
        base_len = len(message.tokens) if isinstance(message, Open) else message.base_len
        ahead = isinstance(message, Commit) and message.verifying is None
        place = (message.epoch, message.round - ahead)
        self._judge("place", place >= watched.place, f"{message} goes back behind {watched.place}")
        watched.place = place
        self._judge("place", base_len == len(known), f"{message} says so of {len(known)} tokens")
        self._judge("place", known == watched.text.first(base_len), f"{message} is of {known}")
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
        if proposal.source is ProposalSource.CACHE:
            chain = tuple(proposal.chain[node] for node in proposal.drafter_nodes)
            place, tokens = (message.epoch, message.round - 1), tuple(request.sequence.tokens)
            held = any(
                key[:2] == place and key[3] == tokens[key[2] :] and key[4][: len(chain)] == chain
                for key in watched.prepared
            )
            self._judge("served", held, f"{message} was prepared by nobody for {place}")

    def _from_cache(self, watched: Watched, message: Prepare, key: PreparedKey) -> None:
        committed, chain, _ = key
        proposal = self.rounds._requests[message.request].round.prepared[key]
        own = tuple(proposal.chain[node] for node in proposal.drafter_nodes)
        place = (message.epoch, message.round, message.base_len, committed)
        held = any(key[:4] == place and key[4][: len(own)] == own for key in watched.prepared)
        self._judge("served", held, f"{message}: {chain} was prepared by nobody for {place}")

    # --- what workers say -----------------------------------------------------------------------------------------

    def worker_said(self, name: str, message: Message) -> None:
        """Before the network has it."""
        watched = self.requests.get(getattr(message, "request", None) or "")
        match message:
            case Fault():
                self._judge("failures", self.lied, f"{name} says {message}")
            case Branches() if watched is not None:
                self._span(name, message.work)
                for entry in message.entries:
                    self._is_fresh(name, watched, message.base_len, entry.committed, entry.chain)
            case Drafted() if watched is not None:
                self._span(name, message.work)
                self._is_fresh(name, watched, message.base_len, (), message.chain)
            case Outcome():
                self._span(name, message.work)
        self.judged["failures"] += 1

    def _is_fresh(
        self, name: str, watched: Watched, base_len: int, committed: tuple[int, ...], chain: tuple[int, ...]
    ) -> None:
        text = [*watched.text.first(base_len), *committed]
        said = self._others.get(name, self._fresh).says(text, len(chain), watched.admit.sampling)
        self._judge("fresh", list(chain) == said, f"{watched.admit.request}: {chain}, not {said} after {text}")

    def _span(self, name: str, work: Span) -> None:
        self._judge("times", 0 < work.started_ns <= work.ended_ns <= self._clock(), f"{name} worked {work}")

    # --- what the rounds hear -------------------------------------------------------------------------------------

    def says_again(self, messages: Sequence[Message]) -> bool:
        """Whether one of these has made its tokens final already, or comes twice."""
        keys = [_key(message) for message in messages if isinstance(message, Outcome)]
        return len(set(keys)) < len(keys) or not self._taken.isdisjoint(keys)

    def wants(self, messages: Sequence[Message]) -> None:
        """The rounds are about to be told this."""
        self._stale_before, self._again = self.rounds.stale, self.says_again(messages)
        self._told_before = {name: len(watched.tokens) for name, watched in self.requests.items()}
        for message in messages:
            watched = self.requests.get(getattr(message, "request", None) or "")
            if isinstance(message, Branches) and watched is not None:
                place = (message.epoch, message.round, message.base_len)
                watched.prepared |= {(*place, entry.committed, entry.chain) for entry in message.entries}

    def heard(self, messages: Sequence[Message]) -> None:
        """They have taken it in."""
        if self._again:
            self._judge("stale", self.rounds.stale == self._stale_before + 1, f"{messages} counts again")
        for message in messages:
            if isinstance(message, Outcome) and message.request in self.requests:
                watched = self.requests[message.request]
                at = message.base_len - len(watched.admit.tokens)
                if self._told_before[message.request] <= at < len(watched.tokens):
                    self._taken.add(_key(message))

    # --- what workers hold ----------------------------------------------------------------------------------------

    def looks_at(self, worker: TargetWorker | DraftWorker, watched: WatchedDrafter | None) -> None:
        """After a worker's turns."""
        if isinstance(worker, TargetWorker):
            self._looks_at_target(worker)
        else:
            self._looks_at_drafter(worker, watched)

    def _looks_at_target(self, worker: Any) -> None:
        running, texts, cache = worker._running, worker._kv_cache._sequences, worker._prefixes.cache
        for name, one in running.items():
            self._are_committed(name, one.slot.tokens)
            for part in one._drafting.values():
                self._are_committed(name, part.column_tokens())
            fed = one.slot.fed - worker.runner.is_verifying(one)  # a step may be under way behind one that is not read
            self._judge("columns", fed < len(one.slot.tokens), f"{name}: {fed} of {one.slot.tokens} are fed")
        self._judge("memory", len(texts) == len(running), f"{len(texts)} texts are held for {len(running)} requests")
        self._holds_within(cache, len(running))

    def _looks_at_drafter(self, worker: Any, watched: Any) -> None:
        for name, one in worker._running.items():
            self._are_committed(name, one.work.tree.column_tokens())
        self._holds_within(worker._drafter.prompt_cache, len(worker._running))

    def _are_committed(self, name: str, tokens: Sequence[int]) -> None:
        expected = self.requests[name].text.first(len(tokens))
        self._judge("columns", list(tokens) == expected[: len(tokens)], f"{name}: {tokens}, not {expected}")

    def _holds_within(self, cache: Any, running: int) -> None:
        use = cache.use
        self._judge("memory", use.bytes <= cache._limit, f"{use.bytes} bytes are remembered in {cache._limit}")
        self._judge("memory", len(cache._running) == running, f"{len(cache._running)} texts for {running} requests")

    def judge(self, name: str, holds: bool, why: str) -> None:
        """A check that only whoever runs the cluster can make."""
        self._judge(name, holds, why)

    def _judge(self, name: str, holds: bool, why: str) -> None:
        self.judged[name] += 1
        if not holds:
            raise Violation(name, why)


def _key(outcome: Outcome) -> tuple[str, int, int]:
    return outcome.request, outcome.epoch, outcome.round
