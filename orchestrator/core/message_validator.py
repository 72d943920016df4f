"""Validates the workers' messages about requests against what each drafter was sent.

`MessageValidator`: the target may send outcomes, drafters branches and chains, all of the request's epoch. A late
message is valid if it answers what its sender was sent (`SentTasks`). A message that answers nothing, or exceeds what
was requested, is invalid and has a kind (`INVALID`). The pool has already checked that it comes from the process that
holds the sender's name.

`SentTasks` records the rounds that a drafter's messages may be about. Every message of an honest drafter answers an
OPEN or a COMMIT that it was sent, however late it comes. The records are bounded: the latest rounds of a running
request, and the drafters of the latest requests that have ended.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outrider.orchestrator.core.request import Request
from outrider.protocol.messages import (
    Alternatives,
    Branches,
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
from outrider.protocol.trees import fault, line

# Records kept of requests that have ended: a drafter still busy with an older one was given up long ago.
MOST_OVER = 2048
MOST_ROUNDS = 8

Place = tuple[int, int]
"""Epoch and round."""


@dataclass(frozen=True, slots=True)
class DraftTask:
    """A drafter's task in a round, after `base_len` committed tokens: prepare `branches` outcomes of the chain
    `verifying`, each `depth` tokens deep, or, if that is None, continue the text. `alternatives`: may be sent.
    """

    base_len: int
    verifying: tuple[int, ...] | None
    depth: int
    branches: int
    alternatives: bool = False


@dataclass(slots=True)
class RequestTasks:
    """The tasks of one request, by epoch and round; the oldest are dropped."""

    latest: Place = (0, 0)
    at: OrderedDict[Place, tuple[DraftTask, ...]] = field(default_factory=OrderedDict)

    def add(self, place: Place, task: DraftTask) -> None:
        tasks = self.at.get(place, ())
        if task not in tasks:
            self.at[place] = (*tasks[-MOST_ROUNDS:], task)
        self.latest = max(self.latest, place)
        if len(self.at) > MOST_ROUNDS:
            self.at.popitem(last=False)

    def is_past(self, place: Place) -> bool:
        """Whether tasks there may have been dropped."""
        return place < min(self.at)


class SentTasks:
    """The tasks that all drafters were sent, by drafter and request."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[str, RequestTasks]] = {}
        self._forgotten: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def record(self, drafter: str, message: Open | Commit) -> None:
        """Records a message sent to a drafter."""
        base_len = len(message.tokens) if isinstance(message, Open) else message.base_len
        tasks = self._tasks.setdefault(drafter, {}).setdefault(message.request, RequestTasks())
        task = DraftTask(base_len, message.verifying, message.depth, message.branches, message.min_prob < 1.0)
        tasks.add((message.epoch, message.round), task)

    def forget(self, request: str) -> None:
        """Drops the tasks of a request that has ended: later messages about it are late."""
        drafters = [drafter for drafter, requests in self._tasks.items() if requests.pop(request, None) is not None]
        self._forgotten[request] = tuple(drafters)
        if len(self._forgotten) > MOST_OVER:
            self._forgotten.popitem(last=False)

    def tasks(self, drafter: str, request: str) -> RequestTasks | None:
        """Returns the tasks that a drafter was sent for a running request; None: none."""
        return self._tasks.get(drafter, {}).get(request)

    def is_forgotten(self, drafter: str, request: str) -> bool:
        """Whether the drafter was sent a request that has ended."""
        return drafter in self._forgotten.get(request, ())


TARGETS = (Outcome, Features, Prefilled, Resync, Fault)
DRAFTERS = (Branches, Drafted, Prefilled, Resync, Fault)

flat = itertools.chain.from_iterable
LATE = "late"
INVALID = {
    "role": "messages that drafters must not send",
    "request": "messages about requests that are not its own",
    "round": "messages about unknown rounds",
    "base_len": "a wrong number of committed tokens",
    "unasked": "branches or chains that were not requested",
    "length": "more or longer chains than requested",
    "vocabulary": "tokens outside its own vocabulary",
    "beside": "alternative tokens that were not requested or are invalid",
    "q": "probabilities that don't match its tokens",
    "frame": "frames that are not messages",
    "flood": "too many messages",
}
"""The kinds of invalid messages, as texts that follow "it sent"."""


class MessageValidator:
    """Validates messages by what their senders were `sent`."""

    def __init__(self) -> None:
        self.sent = SentTasks()

    def refusal(self, request: Request | None, from_target: bool, sender: str, message: Message, vocab: int) -> str:
        """Returns why a message is dropped: LATE, or a kind of `INVALID`; empty: it is valid.

        `request` is None if it has ended or never was; `vocab` is the size of the sender's vocabulary.
        """
        if from_target:
            allowed = isinstance(message, TARGETS) and request is not None and not request.over
            return "" if allowed and _is_of_epoch(request, message) else LATE
        if not isinstance(message, DRAFTERS):
            return "role" if hasattr(message, "request") else LATE  # other messages are handled by the pool
        tasks = self.sent.tasks(sender, message.request or "")
        if tasks is None:
            return LATE if self.sent.is_forgotten(sender, message.request or "") else "request"
        kind = _invalid(tasks, message, vocab)
        if kind:
            return kind
        runs = request is not None and not request.over and sender in request.drafters
        return "" if runs and _is_of_epoch(request, message) else LATE


def _is_of_epoch(request: Request | None, message: Message) -> bool:
    return request is not None and getattr(message, "epoch", request.epoch) == request.epoch


def _invalid(tasks: RequestTasks, message: Branches | Drafted | Prefilled | Resync | Fault, vocab: int) -> str:
    """Returns the kind of an invalid message, or LATE; empty: it is valid."""
    match message:
        case Fault():
            return ""
        case Prefilled() | Resync():
            return "round" if message.epoch > tasks.latest[0] else ""
    place = message.epoch, message.round
    sent = tasks.at.get(place)
    if sent is None:
        return LATE if tasks.is_past(place) else "round"
    fitting = [task for task in sent if task.base_len == message.base_len]
    if not fitting:
        return "base_len"
    if not _fits_q(message):
        return "q"
    kinds = [_misfit(task, message, vocab) for task in fitting]
    return "" if "" in kinds else kinds[-1]


def _fits_q(message: Branches | Drafted) -> bool:
    """Whether the message's chains can have been drawn from its q, if it has one; the verify requires that."""
    if message.q is None:
        return True
    chains = [message.chain] if isinstance(message, Drafted) else [entry.chain for entry in message.entries]
    return message.q.fits([token for chain in chains for token in chain])


def _misfit(task: DraftTask, message: Branches | Drafted, vocab: int) -> str:
    """Returns the kind of an invalid answer to this task; empty: it is valid."""
    if isinstance(message, Branches):
        return _misfit_branches(task, message, vocab)
    if task.verifying is not None:
        return "unasked"
    if len(message.chain) > task.depth:
        return "length"
    if _are_invalid(task, message.chain, message.alternatives, vocab):
        return "beside"
    return "vocabulary" if _foreign(message.chain, vocab) else ""


def _misfit_branches(task: DraftTask, message: Branches, vocab: int) -> str:
    if not message.entries:
        return ""
    if task.verifying is None:
        return "unasked"
    if len(message.entries) > task.branches:
        return "length"
    committed = [entry.committed for entry in message.entries]
    chains = [entry.chain for entry in message.entries]
    prefixes = {task.verifying[:accepted] for accepted in range(len(task.verifying) + 1)}
    if not all(committed) or not prefixes.issuperset([tokens[:-1] for tokens in committed]):
        return "unasked"
    if max(map(len, chains)) > task.depth:
        return "length"
    if any(_are_invalid(task, entry.chain, entry.alternatives, vocab) for entry in message.entries):
        return "beside"
    bonuses = [tokens[-1] for tokens in committed]
    return "vocabulary" if _foreign(bonuses, vocab) or _foreign(flat(chains), vocab) else ""


def _are_invalid(task: DraftTask, chain: Sequence[int], others: Alternatives | None, vocab: int) -> bool:
    """Whether `others` are no valid alternatives to the tokens of `chain`."""
    if others is None:
        return False
    count, odds = len(others.tokens), others.odds
    if not task.alternatives or not count == len(others.parents) == len(odds) or _foreign(others.tokens, vocab):
        return True
    sound = max(others.parents, default=-1) < len(chain) and all(0.0 <= share <= 1.0 for share in odds)
    return not sound or bool(fault((*chain, *others.tokens), (*line(len(chain)), *others.parents)))


def _foreign(tokens: Iterable[int], vocab: int) -> bool:
    """Whether a token is outside the vocabulary."""
    return max(tokens, default=0) >= vocab
