"""All drafters: which outcomes of a round each prepares, which one is asked for a chain, and what each knows.

A drafter has a state in each request (`DrafterState`) and one over all requests (`DrafterLatency`). A drafter that
missed something, or joins later, reads the whole text; the others hear nothing of that. A drafter that is not asked for
a while hears nothing either, and gets with its next task what became final meanwhile. Sends OPEN, COMMIT and CLOSE;
decides nothing about what is verified.

`DrafterLatency`: how soon a drafter's work comes, as the orchestrator sees it. Its speed, its link and its work for
other requests are one number: the time from a message to what it brings, in milliseconds of the orchestrator's clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from outrider.orchestrator.core.message_validator import SentTasks
from outrider.orchestrator.core.policy.estimates import Average, Estimates
from outrider.orchestrator.core.proposal import worth_telling
from outrider.orchestrator.core.request import NO_RANKS, Request
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import Abilities, Branches, Close, Commit, Drafted, Features, Message, Open
from outrider.protocol.schema import MAX_COMMIT


class Workers(Protocol):
    """The workers as the rounds need them."""

    @property
    def target_context(self) -> int: ...

    @property
    def target_abilities(self) -> Abilities: ...

    def notes(self) -> list[str]:
        """Why there is less speculation than was asked for."""
        ...

    def is_target(self, name: str) -> bool: ...

    def drafters(self) -> set[str]:
        """Names of the drafters that are ready."""
        ...

    def prefill_workers(self) -> set[str]:
        """Names of those that are ready to read prompts for this target."""
        ...

    def vocabulary(self, name: str) -> int:
        """How many tokens this worker's model has."""
        ...

    def record_invalid(self, name: str, kind: str) -> None:
        """Counts an invalid message of a drafter, by its kind (`message_validator.INVALID`); many disconnect it."""
        ...

    def features(self, name: str) -> str:
        """Of what the rows are made that this drafter reads; empty: it reads none."""
        ...

    def model(self, name: str) -> object:
        """What tells drafters that rank outcomes alike from others."""
        ...

    def send_target(self, message: Message) -> None: ...

    def send_worker(self, name: str, message: Message) -> None: ...

    def flush_and_yield(self) -> None:
        """Lets what was sent leave before anything else is done here."""
        ...


def opening(
    request: Request, verifying: tuple[int, ...] | None, ranks: range = range(0), min_prob: float = 1.0
) -> Open:
    """The text so far; for a drafter, the outcomes that it is to prepare of what the target verifies."""
    return Open(
        request=request.id,
        epoch=request.epoch,
        round=request.round,
        tokens=np.asarray(request.tokens, np.int32),
        sampling=request.admit.sampling,
        eos=tuple(sorted(request.admit.eos)),
        depth=request.depth,
        branches=len(ranks) or request.branches,
        verifying=verifying,
        generated=request.generated,
        rank_offset=ranks.start,
        features=request.admit.mode != "ar",
        min_prob=min_prob,
    )


SMOOTHING = 0.3
# Who is not worth being asked is tried again after so many rounds.
TRIAL_ROUNDS = 32
# Another leads only when it is quicker by so much: the one that leads has the chain under verification in its tree.
LEADS = 0.9
# Drafters share alike that bring at least so much of what the best of them brings in time.
ALIKE = 0.75


class DrafterLatency:
    """One drafter's. `left_out`: rounds since it was last asked."""

    def __init__(self) -> None:
        self.left_out = 0
        self._lag_ms = Average(SMOOTHING)
        self._step_ms = Average(SMOOTHING)

    @property
    def is_known(self) -> bool:
        return self._lag_ms.value is not None

    @property
    def is_due(self) -> bool:
        """Whether it is to be tried although it is not worth being asked, or although that is not known."""
        return not self.is_known or self.left_out >= TRIAL_ROUNDS

    @property
    def lag_ms(self) -> float:
        """From a word to the first tokens; 0: not known."""
        return self._lag_ms.value or 0.0

    @property
    def step_ms(self) -> float:
        """One token more; 0: not known."""
        return self._step_ms.value or 0.0

    def observe_first(self, milliseconds: float) -> None:
        """The first tokens came after so long."""
        self._lag_ms.add(milliseconds)

    def observe_next(self, milliseconds: float) -> None:
        """The next ones came after so long."""
        self._step_ms.add(milliseconds)

    def observe_chain(self, tokens: int, milliseconds: float) -> None:
        """A chain came at once."""
        step = self.step_ms or milliseconds / max(tokens, 1)
        self._step_ms.add(step)
        self._lag_ms.add(max(milliseconds - (tokens - 1) * step, step))

    def observe_overdue(self, milliseconds: float) -> None:
        """Nothing came for so long, and as long again is to be expected."""
        if milliseconds > self.lag_ms:
            self._lag_ms.add(2 * milliseconds)

    def reset(self) -> None:
        """After a time in which it was left out: what was known is old."""
        self.left_out = 0
        self._lag_ms = Average(SMOOTHING)

    def ready_ms(self, depth: int) -> float:
        """From a word until what was asked for is `depth` deep."""
        return self.lag_ms + (depth - 1) * self.step_ms

    def share(self, depth: int, within_ms: float) -> float:
        """How much of the depth is there in time, from 0, nothing, to 1."""
        left_ms = within_ms - self.lag_ms
        if left_ms < 0 or not self.is_known:
            return 0.0
        if left_ms >= (depth - 1) * self.step_ms:
            return 1.0
        return (1.0 + left_ms / self.step_ms) / depth


Latencies = Mapping[str, DrafterLatency]
Models = Mapping[str, object]
"""What each drafter runs: those of one model rank alike."""


def quickest(latencies: Latencies, depth: int, lead: str = "") -> list[str]:
    """Their names, the quickest first, unknown ones last."""

    def expected(name: str) -> tuple[bool, float, str]:
        latency = latencies[name]
        return not latency.is_known, latency.ready_ms(depth) * (LEADS if name == lead else 1.0), name

    return sorted(latencies, key=expected)


def dealt(
    latencies: Latencies, models: Models, lead: str, branches: int, depth: int, within_ms: float
) -> dict[str, range]:
    """Which ranks each prepares, the quickest first: it has the likeliest outcomes, and leads.

    The `on_branches` likeliest of a model's ranking are shared by its drafters that are about as good in time as their
    best. One that brings less of the depth gets some behind those, which takes nothing from anybody; one that brings
    nothing in time gets these only when its trial is due. The quickest of all is asked however slow it is.
    """
    order = quickest(latencies, depth, lead)
    shares = {name: latencies[name].share(depth, within_ms) for name in order}
    asked = [name for name in order if shares[name] or name == order[0] or latencies[name].is_due]
    found: dict[str, range] = {}
    for model in dict.fromkeys(models[name] for name in asked):
        alike = [name for name in asked if models[name] == model]
        best = max(shares[name] for name in alike)
        good = [name for name in alike if shares[name] and shares[name] >= ALIKE * best] or alike[:1]
        width, others = max(branches // len(alike), 1), [name for name in alike if name not in good]
        found |= evenly(good, branches)
        found |= {name: range(branches + n * width, branches + (n + 1) * width) for n, name in enumerate(others)}
    return {name: found[name] for name in order if name in found}


def evenly(names: Sequence[str], branches: int) -> dict[str, range]:
    """All ranks once, in the order of the names."""
    ends = [branches * index // len(names) for index in range(len(names) + 1)]
    return {name: range(first, last) for name, first, last in zip(names, ends, ends[1:], strict=False) if last > first}


class DraftPool:
    """`sent`: records what they are sent. `evenly_dealt`: no measurement decides about their shares, so rounds are
    reproducible."""

    def __init__(self, workers: Workers, sent: SentTasks, estimates: Estimates, evenly_dealt: bool) -> None:
        self._workers = workers
        self._sent = sent
        self._estimates = estimates
        self._evenly_dealt = evenly_dealt
        self._latencies: defaultdict[str, DrafterLatency] = defaultdict(DrafterLatency)

    def latency(self, drafter: str) -> DrafterLatency:
        """How soon its work comes."""
        return self._latencies[drafter]

    # --- what they are sent ---------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """All read the committed tokens, and prepare the round's outcomes, if it has any to prepare for."""
        ranks = self._deal(request) if _verifying(request) is not None else {}
        request.cache.start(_counts(ranks))
        for name in request.drafters:
            self._open(request, name, ranks.get(name, NO_RANKS))

    def join(self, request: Request, name: str) -> None:
        """This one reads the committed tokens; alone, it prepares the outcomes of the round under way, too."""
        alone = len(request.drafters) == 1 and _verifying(request) is not None
        ranks = range(request.branches) if alone else NO_RANKS
        if ranks:
            request.cache.start({name: len(ranks)})
        self._open(request, name, ranks)

    def reopen(self, request: Request, name: str) -> None:
        """This one has missed something: it reads the committed tokens, and does what it was asked for."""
        state = request.drafters[name]
        asked, round_, ranks, depth = not state.done, state.round, state.ranks, state.depth
        self._open(request, name, ranks if asked and round_ == request.round else NO_RANKS)
        if state.done:
            request.cache.lost(name)
        if asked and round_ > request.round:
            self._commit(request, name, round_, None, NO_RANKS, depth, 0)

    def prepare(self, request: Request, now_ns: int) -> None:
        """The target has its round: each is sent what became final, and which of its outcomes to prepare."""
        ranks = self._deal(request)
        self._expire(request, now_ns)
        request.cache.start(_counts(ranks))
        for name in ranks:
            self._commit(request, name, request.round, request.proposal.line, ranks[name], request.depth, now_ns)

    def ask(self, request: Request, depth: int, now_ns: int) -> None:
        """Asks the quickest for what follows the committed text, and tries others that were not asked for long.

        One, for the answer of the quickest is the first one: more would only keep the others from the next round.
        """
        latencies = self._of(request)
        first, *others = sorted(latencies) if self._evenly_dealt else quickest(latencies, depth)
        self._expire(request, now_ns)
        for name in [first] + [name for name in others if latencies[name].is_due and not self._evenly_dealt]:
            self._commit(request, name, request.round + 1, None, NO_RANKS, depth, now_ns)
            latencies[name].left_out = 0
        for name in others:
            latencies[name].left_out += 1

    def forward_features(self, request: Request, message: Features) -> None:
        """What the target tells of its rows goes to those that read them."""
        for name in request.drafters:
            if self._workers.features(name):
                self._workers.send_worker(name, message)

    def remove(self, request: Request, name: str) -> None:
        """It drafts for this request no longer; it may only have slept, and would work on."""
        del request.drafters[name]
        request.cache.lost(name)
        self._workers.send_worker(name, Close(request.id))

    def close(self, request: Request) -> None:
        """The request is over."""
        for name in request.drafters:
            self._workers.send_worker(name, Close(request.id))
        self._sent.forget(request.id)

    # --- what they say --------------------------------------------------------------------------------------------

    def on_branches(self, request: Request, name: str, message: Branches, now_ns: int) -> None:
        """A push of one that was asked for it."""
        state = request.drafters[name]
        if len(request.drafters) == 1:  # there is none to compare it with
            state.done = message.final
            state.pushes += 1
            return
        latency = self._latencies[name]
        state.pushes += bool(message.entries)
        if message.entries and state.pushes == 1 and state.asked_ns:
            latency.observe_first((now_ns - state.asked_ns) / MILLISECOND_NS)
        elif message.entries and state.pushes > 1:
            latency.observe_next((now_ns - state.heard_ns) / MILLISECOND_NS)
        state.heard_ns, state.done = now_ns, message.final

    def on_late_branches(self, request: Request, name: str, message: Branches, now_ns: int) -> None:
        """A push for a round that has ended: how late it comes is all that it says."""
        state = request.drafters[name]
        if message.entries and message.round == state.round and state.asked_ns and not state.pushes:
            self._latencies[name].observe_first((now_ns - state.asked_ns) / MILLISECOND_NS)
            state.pushes = 1

    def on_drafted(self, request: Request, name: str, message: Drafted, now_ns: int) -> None:
        """The chain of one that was asked for it, whether it is still waited for or not."""
        state = request.drafters[name]
        if state.asked_ns:
            self._latencies[name].observe_chain(len(message.chain), (now_ns - state.asked_ns) / MILLISECOND_NS)
        state.done = True

    def on_overdue(self, request: Request, now_ns: int) -> None:
        """A wait for them has ended with nothing."""
        self._expire(request, now_ns)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _of(self, request: Request) -> Mapping[str, DrafterLatency]:
        return {name: self._latencies[name] for name in request.drafters}

    def _deal(self, request: Request) -> dict[str, range]:
        """What each prepares; the first leads. With one there is nothing to decide."""
        names, branches = request.drafters, request.branches
        if len(names) == 1 or not names:
            self._estimates.part = 1.0
            return dict.fromkeys(names, range(branches))
        if self._evenly_dealt:
            return evenly(sorted(names), branches)
        latencies, within_ms = self._of(request), self._estimates.verify_ms(request.depth + 1)
        models = {name: self._workers.model(name) for name in names}
        ranks = dealt(latencies, models, request.cache.lead, branches, request.depth, within_ms)
        for name, latency in latencies.items():
            if name not in ranks:
                latency.left_out += 1
            elif latency.left_out:
                latency.reset()
        self._estimates.part = len(ranks[next(iter(ranks))]) / max(branches, 1)
        return ranks

    def _expire(self, request: Request, now_ns: int) -> None:
        """What was asked for before and has not begun to come is overdue, and no longer waited for."""
        for name, state in request.drafters.items():
            if not state.done and not state.pushes and state.asked_ns:
                self._latencies[name].observe_overdue((now_ns - state.asked_ns) / MILLISECOND_NS)
            state.done = True

    def _open(self, request: Request, name: str, ranks: range) -> None:
        state, verifying = request.drafters[name], _verifying(request) if ranks else None
        min_prob = worth_telling(self._estimates, request.takes_trees)
        self._send(name, opening(request, verifying, ranks, min_prob))
        state.is_asked(request.round, ranks, request.depth, len(request.tokens), 0)
        state.done = verifying is None

    def _commit(
        self,
        request: Request,
        name: str,
        round_: int,
        verifying: tuple[int, ...] | None,
        ranks: range,
        depth: int,
        now_ns: int,
    ) -> None:
        """COMMIT; a drafter that lacks more tokens than a message holds is opened anew first."""
        state = request.drafters[name]
        if len(request.tokens) - state.known_len > MAX_COMMIT:
            self._open(request, name, NO_RANKS)
            now_ns = 0
        message = Commit(
            request=request.id,
            epoch=request.epoch,
            round=round_,
            base_len=len(request.tokens),
            tokens=tuple(request.tokens[state.known_len :]),
            verifying=verifying,
            depth=depth,
            branches=len(ranks),
            rank_offset=ranks.start,
            min_prob=worth_telling(self._estimates, request.takes_trees),
        )
        state.is_asked(round_, ranks, depth, len(request.tokens), now_ns)
        self._send(name, message)

    def _send(self, drafter: str, message: Open | Commit) -> None:
        self._sent.record(drafter, message)
        self._workers.send_worker(drafter, message)


def _counts(ranks: Mapping[str, range]) -> dict[str, int]:
    return {name: len(share) for name, share in ranks.items()}


def _verifying(request: Request) -> tuple[int, ...] | None:
    """The chain whose outcomes a drafter is to prepare; None: it only reads, as where the round has ended."""
    under_way = request.base_len == len(request.tokens) and not request.proposal.autonomous
    return request.proposal.line if request.mode == "ssd" and under_way else None
