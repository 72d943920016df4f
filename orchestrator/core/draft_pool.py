"""Divides the outcomes of a round among the drafters, requests chains from them, and sends them the text.

A drafter has a state in each request (`DrafterState`) and one over all requests (`DrafterLatency`). A drafter that
missed a message, or joins later, reads the whole text; the others are sent nothing. A drafter without a task is sent
nothing, and gets the tokens that became final meanwhile with its next task. Sends OPEN, COMMIT and CLOSE; does not
decide what is verified.

`SentTasks` validates messages. The target may send outcomes, drafters branches and chains, all of the request's epoch.
A message that answers nothing, or exceeds what was requested, is invalid and has a kind (`INVALID_KINDS`). The pool has
already checked that it comes from the process that holds the sender's name.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from outrider.orchestrator.core.policy.constants import POLICY
from outrider.orchestrator.core.policy.estimates import DrafterLatency, Estimates
from outrider.orchestrator.core.proposal import min_alternative_prob
from outrider.orchestrator.core.request import NO_RANKS, DrafterState, Request
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import (
    Alternatives,
    Branch,
    Branches,
    Close,
    Commit,
    Drafted,
    Fault,
    Features,
    Message,
    Open,
    Outcome,
    Prefilled,
    Resync,
)
from outrider.protocol.schema import MAX_COMMIT_TOKENS
from outrider.protocol.trees import chain_parents, tree_fault

if TYPE_CHECKING:
    from outrider.orchestrator.core.worker_pool import WorkerPool

# Records kept of requests that have ended: a drafter still busy with an older one was given up long ago.
MAX_ENDED_REQUESTS = 2048
MAX_RECORDED_ROUNDS = 8

RoundKey = tuple[int, int]
"""Epoch and round."""

# A new drafter leads only if it needs less than this share of the lead's time: the lead's tree has the chain already.
MAX_NEW_LEAD_TIME_RATIO = 0.9

# Drafters share the likeliest outcomes if they reach at least this share of the best one's depth in time.
MIN_SIMILAR_DEPTH_RATIO = 0.75

Latencies = Mapping[str, DrafterLatency]

# A drafter that was lost this often in a row while it drafted for a request, without an answer, is not taken back.
MAX_LOSSES = 2

TargetMessage = Outcome | Features | Prefilled | Resync | Fault
DrafterMessage = Branches | Drafted | Resync | Fault
LATE = "late"
INVALID_KINDS = {
    "role": "messages that drafters must not send",
    "request": "messages about requests that are not its own",
    "round": "messages about unknown rounds",
    "base_len": "a wrong number of committed tokens",
    "unrequested": "branches or chains that were not requested",
    "length": "more or longer chains than requested",
    "vocabulary": "tokens outside its own vocabulary",
    "alternatives": "alternative tokens that were not requested or are invalid",
    "odds": "acceptance probabilities that do not match its tokens",
    "q": "distributions that do not match its tokens",
    "frame": "frames that are not messages",
    "flood": "too many messages",
}
"""The kinds of invalid messages, as texts that follow "it sent"."""


RequestTasks = dict[RoundKey, tuple[Commit, ...]]
"""The tasks of one request at one drafter, in rising order; none in a round of OPEN alone. The oldest are dropped."""


class SentTasks:
    """The tasks that all drafters were sent, by request and drafter, by which their messages are validated.

    Every message of an honest drafter answers an OPEN or a COMMIT that it was sent, however late it comes. Kept are the
    latest rounds of a running request, and the drafters of the latest requests that have ended.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, dict[str, RequestTasks]] = {}
        self._forgotten: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def record(self, drafter: str, message: Open | Commit) -> None:
        """Records a message sent to a drafter."""
        tasks = self._tasks.setdefault(message.request, {}).setdefault(drafter, {})
        sent = tasks.setdefault((message.epoch, message.round), ())
        if isinstance(message, Commit):
            tasks[message.epoch, message.round] = (*sent[-MAX_RECORDED_ROUNDS:], message)
        if len(tasks) > MAX_RECORDED_ROUNDS:
            del tasks[min(tasks)]

    def forget(self, request: str) -> None:
        """Drops the tasks of a request that has ended: later messages about it are late."""
        self._forgotten[request] = tuple(self._tasks.pop(request, ()))
        if len(self._forgotten) > MAX_ENDED_REQUESTS:
            self._forgotten.popitem(last=False)

    def refusal(self, request: Request | None, from_target: bool, sender: str, message: Message, vocab: int) -> str:
        """Returns why a message is dropped: LATE, or a kind of `INVALID_KINDS`; empty: it is valid.

        `request` is None if it has ended or never was; `vocab` is the size of the sender's vocabulary.
        """
        runs = request is not None and getattr(message, "epoch", request.round.epoch) == request.round.epoch
        if from_target:
            return "" if runs and isinstance(message, TargetMessage) else LATE
        if not isinstance(message, DrafterMessage):
            return "role" if hasattr(message, "request") else LATE  # other messages are handled by the pool
        name = message.request or ""
        tasks = self._tasks.get(name, {}).get(sender)
        if tasks is None:
            return LATE if sender in self._forgotten.get(name, ()) else "request"
        invalid = _invalid_kind(tasks, message, vocab)
        return invalid or ("" if runs and request is not None and sender in request.draft.drafters else LATE)


def open_message(request: Request, offered: bool = False) -> Open:
    """Returns OPEN with the text so far, which is `offered` to a prefill worker or not."""
    return Open(
        request=request.id,
        epoch=request.round.epoch,
        round=request.round.number,
        tokens=np.asarray(request.sequence.tokens, np.int32),
        sampling=request.admit.sampling,
        eos=tuple(sorted(request.admit.eos)),
        generated=request.generated,
        fan_out=max(round(request.plan.branches / (request.plan.depth + 1)), 1),
        offered=offered,
        features=request.admit.mode != "ar",
    )


def sort_by_latency(latencies: Latencies, depth: int, lead: str = "") -> list[str]:
    """Returns the drafters' names, the lowest latency first, unknown ones last."""

    def expected(name: str) -> tuple[bool, float, str]:
        latency, factor = latencies[name], MAX_NEW_LEAD_TIME_RATIO if name == lead else 1.0
        return not latency.lag_ms.is_known, factor * latency.ready_ms(depth), name

    return sorted(latencies, key=expected)


def assign_ranks(
    latencies: Latencies, models: Mapping[str, object], lead: str, branches: int, depth: int, within_ms: float
) -> dict[str, range]:
    """Returns the ranks of outcomes that each drafter prepares; the first, which leads, has the likeliest. Drafters
    with the same one of `models` rank outcomes equally.

    The `branches` likeliest outcomes in a model's ranking are divided among its drafters that are about as fast as the
    best. A slower one gets those that rank after them, so it takes none from the others; one that would deliver nothing
    in time gets them only when its trial is due. The drafter with the lowest latency always gets a task.
    """
    order = sort_by_latency(latencies, depth, lead)
    shares = {name: latencies[name].share(depth, within_ms) for name in order}
    candidates = [name for name in order if shares[name] or name == order[0] or latencies[name].is_due]
    ranks: dict[str, range] = {}
    for model in dict.fromkeys(models[name] for name in candidates):
        same_model = [name for name in candidates if models[name] == model]
        best = max(shares[name] for name in same_model)
        similar = [
            name for name in same_model if shares[name] and shares[name] >= MIN_SIMILAR_DEPTH_RATIO * best
        ] or same_model[:1]
        width, others = max(branches // len(same_model), 1), [name for name in same_model if name not in similar]
        ranks |= split_evenly(similar, branches)
        ranks |= {name: range(branches + n * width, branches + (n + 1) * width) for n, name in enumerate(others)}
    return {name: ranks[name] for name in order if name in ranks}


def split_evenly(names: Sequence[str], branches: int) -> dict[str, range]:
    """Divides all ranks evenly, in the order of the names."""
    ends = [branches * index // len(names) for index in range(len(names) + 1)]
    return {name: range(first, last) for name, first, last in zip(names, ends, ends[1:], strict=False) if last > first}


class DraftPool:
    """Sends tasks to the drafters and records them in `sent`. `splits_evenly`: shares do not depend on measurements, so
    that rounds are reproducible."""

    def __init__(self, workers: WorkerPool, estimates: Estimates, splits_evenly: bool) -> None:
        self._workers = workers
        self.sent = SentTasks()
        self._estimates = estimates
        self._splits_evenly = splits_evenly
        self._latencies: defaultdict[str, DrafterLatency] = defaultdict(DrafterLatency)

    # --- messages to drafters -------------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Sends OPEN to all, which read the committed tokens, and their tasks in the round under way, if any."""
        for name in request.draft.drafters:
            self._open(request, name)
        self.start_round(request, 0)

    def add(self, request: Request, name: str) -> bool:
        """Adds a drafter to a request, unless the request seems to have caused its losses. Returns whether it was
        added; `reopen` sends it the text."""
        draft = request.draft
        if not request.admit.can_use_draft_workers or name in draft.drafters or draft.losses[name] >= MAX_LOSSES:
            return False
        draft.drafters[name] = DrafterState()
        request.metrics.rejoined += 1
        return True

    def reopen(self, request: Request, name: str) -> None:
        """Sends OPEN, and its task again if it has one, to a drafter that is new or missed a message."""
        state, wait = request.draft.drafters[name], request.round.wait
        ranks = state.ranks if _chain_to_prepare(request) is not None else NO_RANKS
        depth = request.plan.depth if ranks else wait.depth if wait else 0
        self._open(request, name)
        if depth and not state.done:
            self._commit(request, name, ranks, depth, 0)

    def start_round(self, request: Request, now_ns: int) -> None:
        """Drops the branches of the round before. In SSD, sends COMMIT to the drafters: the tokens that became final,
        and the outcomes that each prepares."""
        ranks = self._assign_ranks(request)
        if ranks:
            self.expire(request, now_ns)
        request.draft.start(ranks)
        for name in ranks:
            self._commit(request, name, ranks[name], request.plan.depth, now_ns)

    def request_chain(self, request: Request, depth: int, now_ns: int) -> None:
        """Requests a chain after the committed text from the fastest drafter, and from others whose trial is due.

        One is enough, since the first answer is used; the others would only start the next round later.
        """
        latencies = self._latencies_of(request)
        names = sorted(latencies) if self._splits_evenly else sort_by_latency(latencies, depth)
        self.expire(request, now_ns)
        for name in names:
            if name == names[0] or (latencies[name].is_due and not self._splits_evenly):
                self._commit(request, name, NO_RANKS, depth, now_ns)
                latencies[name].left_out = 0
            else:
                latencies[name].left_out += 1

    def suspend(self, request: Request) -> None:
        """Drops the branches of a request that the target has lost."""
        request.draft.start()

    def remove(self, request: Request, name: str, was_lost: bool) -> None:
        """Removes a drafter from a request; CLOSE stops it in case it was only suspended."""
        del request.draft.drafters[name]
        request.draft.losses[name] += was_lost
        self._workers.send_worker(name, Close(request.id))

    def forget(self, name: str) -> None:
        """Drops the latency of a drafter that was lost: it, or another of its name, is measured anew."""
        self._latencies.pop(name, None)

    def close(self, request: Request) -> None:
        """Closes a request at all its drafters."""
        for name in request.draft.drafters:
            self._workers.send_worker(name, Close(request.id))
        self.sent.forget(request.id)
        request.draft.cache.clear()

    # --- messages of drafters -------------------------------------------------------------------------------------

    def on_branches(self, request: Request, name: str, message: Branches, now_ns: int) -> bool:
        """Records a push, and keeps its branches if they are awaited; returns whether they are. A push for a round that
        has ended still shows the latency, and the cost of drafting if that is far higher than expected."""
        draft, state, latency = request.draft, request.draft.drafters[name], self._latencies[name]
        draft.losses.pop(name, None)
        pushes, since_ms, is_awaited = state.pushes, _ms_since(state.last_heard_ns, now_ns), state.is_awaited(message)
        if message.entries and len(draft.drafters) > 1:  # with a single drafter there is nothing to compare
            if not pushes and message.round == state.round and state.asked_ns:
                latency.lag_ms.add(_ms_since(state.asked_ns, now_ns))
            elif pushes and is_awaited:
                latency.step_ms.add(since_ms)
        if message.round == state.round:
            state.push(message, is_awaited, now_ns)
        if message.entries and name == draft.lead:
            work_ms = message.work.milliseconds
            if self._estimates.active == 1:
                if is_awaited or work_ms > POLICY.max_stall_factor * self._estimates.depth_ms():
                    self._estimates.observe_depth(len(message.entries), work_ms)
            elif pushes and is_awaited:  # with several requests, trees take turns: the time since the last push counts
                self._estimates.observe_depth(len(message.entries), max(since_ms, work_ms))
        if is_awaited:
            draft.cache.add(message, name)
        return is_awaited

    def on_drafted(self, request: Request, name: str, message: Drafted, now_ns: int) -> bool:
        """Records a chain, even if the wait for it has ended; returns whether the request waits for it.

        A late one shows the costs, too: else a drafter that became slower would miss all limits that follow from them.
        """
        state, wait = request.draft.drafters[name], request.round.wait
        is_awaited, since_ms = state.is_awaited(message), _ms_since(state.chain_asked_ns, now_ns)
        is_timed = state.chain_asked_ns > 0 and state.is_of_round(message)
        is_used = is_awaited and wait is not None and wait.outcome is None
        fastest = sort_by_latency(self._latencies_of(request), request.plan.depth)[0]
        if message.chain and (is_used or (name == fastest and not is_awaited)):
            work = message.work
            self._estimates.observe_draft(len(message.chain), work.milliseconds)
            link_ms = since_ms - work.milliseconds if is_timed else 2 * _ms_since(work.ended_ns, now_ns)
            self._estimates.observe_link(link_ms)
        if is_awaited and is_timed:
            self._latencies[name].observe_chain(len(message.chain), since_ms)
        state.done = state.done or is_awaited
        request.draft.losses.pop(name, None)
        return is_used

    def expire(self, request: Request, now_ns: int) -> None:
        """Ends all tasks; one without any answer counts as overdue."""
        for name, state in request.draft.drafters.items():
            if not state.done and not state.pushes and state.asked_ns:
                self._latencies[name].observe_overdue(_ms_since(state.asked_ns, now_ns))
            state.done = True

    # --- internals ------------------------------------------------------------------------------------------------

    def _latencies_of(self, request: Request) -> Latencies:
        return {name: self._latencies[name] for name in request.draft.drafters}

    def _assign_ranks(self, request: Request) -> dict[str, range]:
        """Returns the ranks that each drafter prepares, if there is a chain; the first leads. A single drafter gets
        all."""
        names, branches, depth = request.draft.drafters, request.plan.branches, request.plan.depth
        if _chain_to_prepare(request) is None:
            return {}
        if len(names) == 1 or not names:
            self._estimates.part = 1.0
            return dict.fromkeys(names, range(branches))
        if self._splits_evenly:
            return split_evenly(sorted(names), branches)
        latencies, within_ms = self._latencies_of(request), self._estimates.verify_ms(depth + 1)
        hellos = {name: self._workers.hello(name) for name in names}
        models = {name: (hello.vocab_size, hello.parameters) for name, hello in hellos.items()}
        ranks = assign_ranks(latencies, models, request.draft.lead, branches, depth, within_ms)
        for name, latency in latencies.items():
            if name not in ranks:
                latency.left_out += 1
            elif latency.left_out:
                latency.reset()
        self._estimates.part = len(ranks[next(iter(ranks))]) / max(branches, 1)
        return ranks

    def _open(self, request: Request, name: str) -> None:
        """Sends OPEN: the drafter reads the committed tokens, and has no task."""
        self._send(name, open_message(request))
        request.draft.drafters[name] = DrafterState(len(request.sequence.tokens))

    def _commit(self, request: Request, name: str, ranks: range, depth: int, now_ns: int) -> None:
        """Sends COMMIT: prepare outcomes of the round under way, or, without `ranks`, a chain for the next one.

        A drafter that lacks more tokens than a message holds gets a new OPEN first.
        """
        drafters, tokens = request.draft.drafters, request.sequence.tokens
        if len(tokens) - drafters[name].known_len > MAX_COMMIT_TOKENS:
            self._open(request, name)
            now_ns = 0
        state, round_ = drafters[name], request.round.number + (0 if ranks else 1)
        message = Commit(
            request=request.id,
            epoch=request.round.epoch,
            round=round_,
            base_len=len(tokens),
            tokens=tuple(tokens[state.known_len :]),
            verifying=request.round.proposal.line if ranks else None,
            depth=depth,
            branches=len(ranks),
            rank_offset=ranks.start,
            min_prob=min_alternative_prob(self._estimates, request.takes_trees),
        )
        state.assign(round_, ranks, len(tokens), now_ns)
        self._send(name, message)

    def _send(self, drafter: str, message: Open | Commit) -> None:
        self.sent.record(drafter, message)
        self._workers.send_worker(drafter, message)


def _ms_since(then_ns: int, now_ns: int) -> float:
    return (now_ns - then_ns) / MILLISECOND_NS


def _chain_to_prepare(request: Request) -> tuple[int, ...] | None:
    """Returns the chain whose outcomes drafters prepare; None: there is none, the round has ended, or the request ends
    with it."""
    proposal, under_way = request.round.proposal, not request.round.wait and request.max_chain_tokens > 0
    return proposal.line if request.plan.mode == "ssd" and under_way and not proposal.autonomous else None


def _invalid_kind(tasks: RequestTasks, message: DrafterMessage, vocab: int) -> str:
    """Returns the kind of an invalid message, or LATE; empty: it is valid."""
    match message:
        case Fault() | Resync():
            return "round" if message.epoch > max(tasks)[0] else ""
    round_key = message.epoch, message.round
    sent = tasks.get(round_key)
    if not sent:
        return LATE if round_key < min(tasks) else "round"  # tasks before the first may have been dropped
    fitting = [task for task in sent if task.base_len == message.base_len]
    if not fitting:
        return "base_len"
    drafts: Sequence[Branch | Drafted] = message.entries if isinstance(message, Branches) else (message,)
    if message.q is not None and not message.q.fits([token for draft in drafts for token in draft.chain]):
        return "q"  # the verify requires that the chains were drawn from it
    kinds = [_invalid_answer_kind(task, message, drafts, vocab) for task in fitting]
    return "" if "" in kinds else kinds[-1]


def _invalid_answer_kind(
    task: Commit, message: Branches | Drafted, drafts: Sequence[Branch | Drafted], vocab: int
) -> str:
    """Returns the kind of an invalid answer to this task; empty: it is valid."""
    bonuses: list[int] = []
    if isinstance(message, Branches):
        if not message.entries:
            return ""
        if task.verifying is None:
            return "unrequested"
        if len(message.entries) > task.branches:
            return "length"
        committed = [entry.committed for entry in message.entries]
        prefixes = {task.verifying[:accepted] for accepted in range(len(task.verifying) + 1)}
        if not all(committed) or not prefixes.issuperset([tokens[:-1] for tokens in committed]):
            return "unrequested"
        bonuses = [tokens[-1] for tokens in committed]
    elif task.verifying is not None:
        return "unrequested"
    if max(len(draft.chain) for draft in drafts) > task.depth:
        return "length"
    if any(_has_invalid_alternatives(task, draft.chain, draft.alternatives, vocab) for draft in drafts):
        return "alternatives"
    if any(len(draft.odds) not in (0, len(draft.chain)) for draft in drafts):
        return "odds"
    tokens = itertools.chain(bonuses, *(draft.chain for draft in drafts))
    return "vocabulary" if _exceeds_vocabulary(tokens, vocab) else ""


def _has_invalid_alternatives(task: Commit, chain: Sequence[int], others: Alternatives | None, vocab: int) -> bool:
    """Whether `others` are not valid alternatives to the tokens of `chain`."""
    if others is None:
        return False
    tokens, parents, odds = others.tokens, others.parents, others.odds
    if task.min_prob >= 1.0 or not len(tokens) == len(parents) == len(odds) or _exceeds_vocabulary(tokens, vocab):
        return True
    sound = max(parents, default=-1) < len(chain) and all(0.0 <= share <= 1.0 for share in odds)
    return not sound or bool(tree_fault((*chain, *tokens), (*chain_parents(len(chain)), *parents)))


def _exceeds_vocabulary(tokens: Iterable[int], vocab: int) -> bool:
    """Whether a token is outside the vocabulary."""
    return max(tokens, default=0) >= vocab
