"""Checks the invariants of docs/architecture.md in a running cluster, with every message and event.

`INVARIANTS` lists them. The number of checks of each is counted, so that a test can see that all are exercised.
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
from tests.network.reference import FreshDrafter, ReferenceText

INVARIANTS = {
    "text": "each token is the target's own, on every path and after every fault",
    "once": "no token is reported twice or after the end, and a request ends once",
    "end": "a request ends where the target's text ends, with the right reason",
    "position": "messages carry request, epoch, round and base_len, which never decrease",
    "stale": "an outcome that was handled before changes nothing and is counted",
    "announced": "the target verifies only what it was asked to verify, or has announced",
    "served": "a served chain was prepared for its outcome, and arrived before that outcome",
    "fresh": "a drafter proposes what a fresh drafter would propose there",
    "columns": "the KV columns of a worker are those of the committed tokens",
    "memory": "running and cached texts stay within their memory limits",
    "failures": "no worker reports a failure",
    "validity": "no valid message of a drafter is counted as invalid, however late or often it arrives",
    "times": "every reported time is of evaluated work, on one clock",
    "counts": "the counts of a request agree with each other and with its tokens, and can be encoded",
    "survival": "a request survives lost drafters, pauses, lost messages and a few deaths of the target; many fail it",
    "termination": "every request ends after the faults have ended",
    "released": "workers release the requests that have ended",
}


class Violation(AssertionError):
    """An invariant is violated."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {INVARIANTS[name]}; but {why}")


@dataclass(slots=True)
class RequestState:
    """What was observed of a request: its events, and the epoch and round of the latest message (`position`)."""

    admit: Admit
    text: ReferenceText
    tokens: list[int] = field(default_factory=list)
    began: bool = False
    ending: ToFront | None = None
    stopped: str = ""
    position: tuple[int, int] = (0, 0)
    deaths: int = 0
    requested: set[tuple[int, int]] = field(default_factory=set)
    prepared: set[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]] = field(default_factory=set)

    @property
    def expected(self) -> list[int]:
        """All tokens of the request, as without faults."""
        prompt, most = len(self.admit.tokens), self.admit.sampling.max_tokens
        whole = self.text.first(prompt + most)[prompt:]
        ends = [at for at, token in enumerate(whole) if token in self.admit.eos]
        return whole[: ends[0] + 1] if ends else whole


class InvariantChecker:
    """Checks every message and event of one cluster. Raises Violation."""

    rounds: Scheduler

    def __init__(
        self,
        target: LoadedModel,
        draft: LoadedModel,
        clock: Callable[[], int],
        others: Mapping[str, LoadedModel] = MappingProxyType({}),
    ) -> None:
        """`others`: the models of the drafters that do not run `draft`."""
        self.checked: Counter[str] = Counter()
        self.requests: dict[str, RequestState] = {}
        self._target, self._clock = target, clock
        self._fresh = FreshDrafter(draft)
        self.set_models(others)
        self._handled: set[tuple[str, int, int]] = set()
        self._count_before: dict[str, int] = {}
        self._stale_before, self._has_repeats = 0, False

    def set_models(self, others: Mapping[str, LoadedModel]) -> None:
        """Sets the models of the drafters that do not run `draft`."""
        self._others = {name: FreshDrafter(model) for name, model in others.items()}

    def on_received(self, name: str, message: Message) -> None:
        """Records that a worker has received a message."""
        state = self.requests.get(getattr(message, "request", None) or "")
        if state is not None and isinstance(message, Open | Verify):
            state.requested.add((message.epoch, message.round))

    # --- requests -------------------------------------------------------------------------------------------------

    def on_begin(self, admit: Admit) -> None:
        self.requests[admit.request] = RequestState(admit, ReferenceText(self._target, admit.tokens, admit.sampling))

    def on_stop(self, request: str, reason: str) -> None:
        if self.requests[request].ending is None:
            self.requests[request].stopped = reason

    def on_target_lost(self) -> None:
        for state in self.requests.values():
            state.deaths += state.ending is None

    # --- events for the front -------------------------------------------------------------------------------------

    def on_event(self, event: ToFront) -> None:
        state = self.requests[event.request]  # type: ignore[union-attr]
        match event:
            case RequestBegan():
                self.check("once", not state.began, f"{event.request} began twice")
                state.began = True
            case Committed():
                self._on_committed(state, event)
            case RequestEnded() | Failed():
                self.check("once", state.ending is None, f"{event.request} ended twice: {state.ending}, {event}")
                state.ending = event
                self._on_ended(state, event)
            case Progress():
                self.check("once", state.ending is None, f"{event} came after the end")

    def _on_committed(self, state: RequestState, event: Committed) -> None:
        name, expected = event.request, state.expected
        self.check("once", state.began and state.ending is None, f"{name} got {event.tokens} out of turn")
        state.tokens += event.tokens
        state.deaths = 0
        tokens, excess = state.tokens, len(state.tokens) - len(expected)
        self.check("once", excess <= 0, f"{name} got {excess} tokens past its end")
        self.check("text", tokens == expected[: len(tokens)], f"{name} got {tokens}, not {expected[: len(tokens)]}")

    def _on_ended(self, state: RequestState, event: RequestEnded | Failed) -> None:
        name = event.request
        too_many_deaths = isinstance(event, Failed) and state.deaths >= FAIL_AFTER_DEATHS and event.message
        self.check("survival", isinstance(event, RequestEnded) or bool(too_many_deaths), f"{name} broke: {event}")
        if isinstance(event, Failed):
            return
        if event.reason == state.stopped:
            self.checked["end"] += 1
        else:
            expected = state.expected
            reason = "eos" if expected[-1] in state.admit.eos else "length"
            holds = state.tokens == expected and event.reason == reason
            ended = f"{name} ended by {event.reason} after {state.tokens}"
            self.check("end", holds, f"{ended}, not {reason} after {expected}")
        self._check_counts(state, event)

    def _check_counts(self, state: RequestState, event: RequestEnded) -> None:
        times, name = event.timings, event.request
        self.check("counts", times.predicted_n == len(state.tokens), f"{name}: {times.predicted_n} tokens are counted")
        prompt = len(state.admit.tokens)
        self.check("counts", times.prompt_n + times.cache_n == prompt, f"{name}: of {prompt} prompt tokens {times}")
        followed = times.cache_late + times.missed_then_plain + times.missed_then_copied + times.missed_then_drafted
        self.check("counts", followed == times.cache_misses, f"{name}: {times.cache_misses} misses, not {followed}")
        self.check("counts", times.draft_n_accepted <= min(times.draft_n, times.predicted_n), f"{name}: {times}")
        numbers = [value for key in times.__struct_fields__ if isinstance(value := getattr(times, key), int | float)]
        self.check("counts", min(numbers) >= 0, f"{name}: a number is negative: {times}")
        encode(Done(name, event.reason, replace(times, queue_ms=0.0), event.notes))

    # --- messages of the orchestrator -----------------------------------------------------------------------------

    def on_sent(self, message: Message) -> None:
        """Checks a message to a worker before the network carries it."""
        state = self.requests.get(getattr(message, "request", ""))
        if state is None or not isinstance(message, Open | Verify | Prepare | Commit):
            return
        known = self.rounds._requests[message.request].sequence.tokens
        base_len = len(message.tokens) if isinstance(message, Open) else message.base_len
        ahead = isinstance(message, Commit) and message.verifying is None
        position = (message.epoch, message.round - ahead)
        self.check("position", position >= state.position, f"{message} goes back behind {state.position}")
        state.position = position
        self.check("position", base_len == len(known), f"{message} is about {len(known)} tokens")
        self.check("position", known == state.text.first(base_len), f"{message} is about {known}")
        if isinstance(message, Verify):
            self._check_served(state, message)
        if isinstance(message, Prepare):
            for committed, chain, parents in zip_longest(
                message.committed, message.chains, message.parents, fillvalue=()
            ):
                self._check_prepared(state, message, (committed, chain, parents))

    def _check_served(self, state: RequestState, message: Verify) -> None:
        request = self.rounds._requests[message.request]
        proposal = request.round.proposal
        if proposal.source is Origin.PREPARED:
            chain = tuple(proposal.chain[node] for node in proposal.drafter_nodes)
            position, tokens = (message.epoch, message.round - 1), tuple(request.sequence.tokens)
            was_prepared = any(
                key[:2] == position and key[3] == tokens[key[2] :] and key[4][: len(chain)] == chain
                for key in state.prepared
            )
            self.check("served", was_prepared, f"no drafter prepared {message} for {position}")

    def _check_prepared(self, state: RequestState, message: Prepare, key: PreparedKey) -> None:
        committed, chain, _ = key
        proposal = self.rounds._requests[message.request].round.prepared[key]
        own = tuple(proposal.chain[node] for node in proposal.drafter_nodes)
        position = (message.epoch, message.round, message.base_len, committed)
        was_prepared = any(key[:4] == position and key[4][: len(own)] == own for key in state.prepared)
        self.check("served", was_prepared, f"{message}: no drafter prepared {chain} for {position}")

    # --- messages of workers --------------------------------------------------------------------------------------

    def on_worker_message(self, name: str, message: Message) -> None:
        """Checks a message of a worker before the network carries it."""
        state = self.requests.get(getattr(message, "request", None) or "")
        match message:
            case Fault():
                self.check("failures", False, f"{name} reports {message}")
            case Branches() if state is not None:
                self._check_span(name, message.work)
                for entry in message.entries:
                    self._check_fresh(name, state, message.base_len, entry.committed, entry.chain)
            case Drafted() if state is not None:
                self._check_span(name, message.work)
                self._check_fresh(name, state, message.base_len, (), message.chain)
            case Outcome() if state is not None:
                self._check_span(name, message.work)
                self.check(
                    "announced", (message.epoch, message.round) in state.requested, f"{message} was not asked for"
                )
                if message.next_proposal is not None:
                    state.requested.add((message.epoch, message.round + 1))
        self.checked["failures"] += 1

    def _check_fresh(
        self, name: str, state: RequestState, base_len: int, committed: tuple[int, ...], chain: tuple[int, ...]
    ) -> None:
        text = [*state.text.first(base_len), *committed]
        fresh = self._others.get(name, self._fresh).propose(text, len(chain), state.admit.sampling)
        self.check("fresh", list(chain) == fresh, f"{state.admit.request}: {chain}, not {fresh} after {text}")

    def _check_span(self, name: str, work: Span) -> None:
        self.check("times", 0 < work.started_ns <= work.ended_ns <= self._clock(), f"{name} worked {work}")

    # --- messages that the orchestrator handles -------------------------------------------------------------------

    def has_repeats(self, messages: Sequence[Message]) -> bool:
        """Returns whether one of these outcomes was handled before, or occurs twice."""
        keys = [_key(message) for message in messages if isinstance(message, Outcome)]
        return len(set(keys)) < len(keys) or not self._handled.isdisjoint(keys)

    def before_messages(self, messages: Sequence[Message]) -> None:
        """Records the state before the scheduler handles these messages."""
        self._stale_before, self._has_repeats = self.rounds.stale, self.has_repeats(messages)
        self._count_before = {name: len(state.tokens) for name, state in self.requests.items()}
        for message in messages:
            state = self.requests.get(getattr(message, "request", None) or "")
            if isinstance(message, Branches) and state is not None:
                position = (message.epoch, message.round, message.base_len)
                state.prepared |= {(*position, entry.committed, entry.chain) for entry in message.entries}

    def on_messages(self, messages: Sequence[Message]) -> None:
        """Checks the state after the scheduler has handled these messages."""
        if self._has_repeats:
            self.check("stale", self.rounds.stale == self._stale_before + 1, f"{messages} counts again")
        for message in messages:
            if isinstance(message, Outcome) and message.request in self.requests:
                state = self.requests[message.request]
                at = message.base_len - len(state.admit.tokens)
                if self._count_before[message.request] <= at < len(state.tokens):
                    self._handled.add(_key(message))

    # --- the state of workers -------------------------------------------------------------------------------------

    def check_worker(self, worker: TargetWorker | DraftWorker) -> None:
        """Checks the state of a worker after its turns."""
        if isinstance(worker, TargetWorker):
            self._check_target(worker)
        else:
            self._check_drafter(worker)

    def _check_target(self, worker: Any) -> None:
        running, texts, cache = worker._running, worker._kv_cache._sequences, worker._cache
        for name, one in running.items():
            self._check_committed(name, one.slot.tokens)
            for part in one._drafting.values():
                self._check_committed(name, column_tokens(part._work.tree) if part._work is not None else [])
            fed = one.slot.fed - worker.runner.is_verifying(one)  # a pipelined forward may already have fed one token
            self.check("columns", fed < len(one.slot.tokens), f"{name}: {fed} of {one.slot.tokens} are fed")
        self.check("memory", len(texts) == len(running), f"{len(texts)} texts are held for {len(running)} requests")
        self._check_memory(cache, len(running))

    def _check_drafter(self, worker: Any) -> None:
        for name, one in worker._running.items():
            self._check_committed(name, column_tokens(one.work.tree))
        begun = [one for one in worker._running.values() if one.work.tree.committed_len]
        self._check_memory(worker._drafter.prompt_cache, len(begun))

    def _check_committed(self, name: str, tokens: Sequence[int]) -> None:
        expected = self.requests[name].text.first(len(tokens))
        self.check("columns", list(tokens) == expected[: len(tokens)], f"{name}: {tokens}, not {expected}")

    def _check_memory(self, cache: Any, running: int) -> None:
        use = cache.use
        self.check("memory", use.bytes <= cache._limit, f"{use.bytes} bytes are cached in {cache._limit}")
        self.check("memory", len(cache._running) == running, f"{len(cache._running)} texts for {running} requests")

    def check(self, name: str, holds: bool, why: str) -> None:
        """Counts the check. Raises Violation unless `holds`."""
        self.checked[name] += 1
        if not holds:
            raise Violation(name, why)


def _key(outcome: Outcome) -> tuple[str, int, int]:
    return outcome.request, outcome.epoch, outcome.round
