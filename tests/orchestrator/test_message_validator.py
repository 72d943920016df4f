"""Which worker may send what about a request: other messages are dropped and counted.

A late message is only dropped. A message that answers nothing its drafter was sent is invalid.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from outrider.orchestrator.core.draft_pool import (
    INVALID_KINDS,
    LATE,
    MAX_ENDED_REQUESTS,
    MAX_RECORDED_ROUNDS,
    SentTasks,
)
from outrider.orchestrator.events import Admit, Committed
from outrider.protocol.messages import (
    Alternatives,
    Branch,
    Branches,
    Close,
    Commit,
    Drafted,
    Fault,
    Message,
    Open,
    Outcome,
    Prefilled,
    Progress,
    Resync,
    Span,
)
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ
from tests.orchestrator.cluster_in_process import Cluster
from tests.system.links import intercept
from tools.simulation.replay import Script

TEXT = tuple(range(1000, 1200))
PROMPT = TEXT[:10]
WORK = Span(0, 1)
VOCABULARY = 5000

pytestmark = pytest.mark.usefixtures("counted_clock")


class ValidatingCluster(Cluster):
    """Records the kinds of messages that are found invalid."""

    def __init__(self) -> None:
        self.invalid: list[str] = []
        super().__init__(TEXT, Script((TEXT,), (0.7,), (1.0,), 4096), ngrams=False)

    def record_invalid(self, name: str, kind: str) -> None:
        self.invalid.append(kind)


@pytest.fixture
def cluster() -> ValidatingCluster:
    made = ValidatingCluster()
    made.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=50), "ssd", frozenset()), 0)
    return made


def outcome(**changes: object) -> Outcome:
    return replace(Outcome("r", 0, 0, len(PROMPT), 0, 7, WORK), **changes)  # type: ignore[arg-type]


def branches(**changes: object) -> Branches:
    return replace(Branches("r", 0, 0, len(PROMPT), (Branch((TEXT[10],), (7,)),), WORK), **changes)  # type: ignore[arg-type]


FOREIGN: list[tuple[str, Message, str]] = [
    ("draft-0", outcome(), "role"),
    ("draft-9", outcome(), "role"),
    ("target-1", outcome(), "role"),
    ("target-0", branches(), ""),
    ("draft-9", branches(), "request"),
    ("target-0", Drafted("r", 0, 1, len(PROMPT) + 1, (7,), WORK), ""),
    ("draft-0", Commit("r", 0, 1, len(PROMPT) + 1, (7,), (), 1, 1), "role"),
    ("target-0", outcome(epoch=1), ""),
    ("target-0", outcome(round=1), ""),
    ("target-0", outcome(base_len=len(PROMPT) + 1), ""),
    ("target-0", outcome(request="another"), ""),
    ("draft-0", branches(request="another"), "request"),
    ("draft-0", branches(epoch=1), "round"),
    ("draft-0", branches(base_len=len(PROMPT) - 1), "base_len"),
]


@pytest.mark.parametrize(("sender", "message", "kind"), FOREIGN, ids=lambda value: getattr(value, "__name__", None))
def test_foreign_or_stale_message_is_dropped_and_counted(
    cluster: ValidatingCluster, sender: str, message: Message, kind: str
) -> None:
    cluster.rounds.handle([(sender, message)], 0)
    assert cluster.rounds.stale == 1 and cluster.invalid == [kind] * bool(kind)
    assert not [event for event in cluster.events if isinstance(event, Committed)]
    assert [type(sent) for sent in cluster.sent_to_target] == [Open]


CHAIN = (5, 6, 7)
BRANCHES_TASK = Commit("r", 2, 9, 40, (1,), CHAIN, depth=2, branches=3)
CHAIN_TASK = replace(BRANCHES_TASK, request="asked", verifying=None)
TREE_TASK = replace(CHAIN_TASK, request="tree", min_prob=0.1)
GOOD = Branches("r", 2, 9, 40, (Branch((8,), (9, 9)), Branch((5, 6, 7, 8), (9,))), WORK, final=True)
DRAFT = Drafted("asked", 2, 9, 40, (1, 2), WORK)
TREE = replace(DRAFT, request="tree", alternatives=Alternatives((3, 4), (-1, 0), (0.2, 0.3)))
Q = SparseQ(np.array([[9]], np.int32), np.array([[1.0]], np.float32))


def with_alternatives(**changes: object) -> Drafted:
    return replace(TREE, alternatives=replace(TREE.alternatives, **changes))  # type: ignore[arg-type]


CASES: dict[str, tuple[Message, str]] = {
    "the requested branches": (GOOD, ""),
    "fewer branches than requested": (replace(GOOD, entries=()), ""),
    "the requested chain": (DRAFT, ""),
    "progress of the prompt, which only the target reports": (Prefilled("r", 2, 3, 40), "role"),
    "a resync": (Resync("r", 2), ""),
    "a resync of an earlier epoch": (Resync("r", 1), LATE),
    "an old round": (replace(GOOD, round=1), LATE),
    "an earlier epoch": (replace(GOOD, epoch=1), LATE),
    "an unknown request": (replace(GOOD, request="x"), "request"),
    "a fault": (Fault("r", "broken", epoch=2), ""),
    "a fault of an earlier epoch": (Fault("r", "broken", epoch=1), LATE),
    "a fault of a future epoch": (Fault("r", "broken", epoch=3), "round"),
    "a fault about an unknown request": (Fault("x", "broken"), "request"),
    "a future round": (replace(GOOD, round=10), "round"),
    "a future epoch": (replace(GOOD, epoch=3), "round"),
    "a resync of a future epoch": (Resync("r", 3), "round"),
    "another base_len": (replace(GOOD, base_len=41), "base_len"),
    "another base_len of a chain": (replace(DRAFT, base_len=39), "base_len"),
    "branches instead of a chain": (replace(GOOD, request="asked"), "unrequested"),
    "a chain instead of branches": (replace(DRAFT, request="r"), "unrequested"),
    "an outcome of another chain": (replace(GOOD, entries=(Branch((6, 8), (9,)),)), "unrequested"),
    "an outcome past the chain": (replace(GOOD, entries=(Branch((*CHAIN, 8, 8), (9,)),)), "unrequested"),
    "an empty outcome": (replace(GOOD, entries=(Branch((), (9,)),)), "unrequested"),
    "a branch that is too long": (replace(GOOD, entries=(Branch((8,), (9, 9, 9)),)), "length"),
    "a chain that is too long": (replace(DRAFT, chain=(1, 2, 3)), "length"),
    "too many branches": (replace(GOOD, entries=tuple(Branch((n,), (9,)) for n in range(4))), "length"),
    "a foreign token": (replace(GOOD, entries=(Branch((8,), (VOCABULARY,)),)), "vocabulary"),
    "a foreign bonus": (replace(GOOD, entries=(Branch((VOCABULARY,), (8,)),)), "vocabulary"),
    "a foreign token in a chain": (replace(DRAFT, chain=(VOCABULARY,)), "vocabulary"),
    "odds of other tokens": (replace(DRAFT, odds=(0.5,)), "odds"),
    "the requested alternatives": (TREE, ""),
    "alternatives that were not requested": (replace(TREE, request="asked"), "alternatives"),
    "alternatives without odds": (with_alternatives(odds=(0.2,)), "alternatives"),
    "alternatives with foreign odds": (with_alternatives(odds=(0.2, 1.5)), "alternatives"),
    "a foreign alternative": (with_alternatives(tokens=(3, VOCABULARY)), "alternatives"),
    "an alternative with an invalid parent": (with_alternatives(parents=(-1, 2)), "alternatives"),
    "an alternative that the chain contains": (with_alternatives(tokens=(3, 2)), "alternatives"),
    "another q": (replace(DRAFT, chain=(8,), q=Q), "q"),
}


@pytest.mark.parametrize(("message", "verdict"), CASES.values(), ids=CASES)
def test_drafter_message_is_checked_against_its_tasks(
    cluster: ValidatingCluster, message: Message, verdict: str
) -> None:
    validator, request = SentTasks(), cluster.rounds._requests["r"]
    request.round.epoch = 2
    for task in (BRANCHES_TASK, CHAIN_TASK, TREE_TASK):
        validator.record("draft-0", task)
    assert validator.refusal(request, False, "draft-0", message, VOCABULARY) == verdict
    assert verdict in ("", LATE, *INVALID_KINDS)


def test_drafter_without_a_task_may_report_and_nothing_else(cluster: ValidatingCluster) -> None:
    """Before its first COMMIT. Once it is no longer a drafter of the request, its reports are late."""
    validator, request = SentTasks(), cluster.rounds._requests["r"]
    validator.record("draft-0", Open("r", 2, 9, np.array(TEXT[:40], np.int32), SamplingParams()))
    request.round.epoch = 2
    reports = [Resync("r", 2), Fault("r", "no more of this", epoch=2)]
    assert [validator.refusal(request, False, "draft-0", message, VOCABULARY) for message in reports] == [""] * 2
    for answer in (GOOD, replace(DRAFT, request="r")):
        assert validator.refusal(request, False, "draft-0", answer, VOCABULARY) == "round"
    assert validator.refusal(request, False, "draft-0", Resync("r", 3), VOCABULARY) == "round"
    validator.record("draft-0", BRANCHES_TASK)
    assert validator.refusal(request, False, "draft-0", GOOD, VOCABULARY) == ""
    request.draft.drafters.clear()
    assert {validator.refusal(request, False, "draft-0", message, VOCABULARY) for message in reports} == {LATE}


def test_answer_to_an_old_task_is_late_and_never_invalid(cluster: ValidatingCluster) -> None:
    """However many rounds follow, and whether or not the drafter is still used for the request."""
    validator, request = SentTasks(), cluster.rounds._requests["r"]
    answers = []
    for number in range(MAX_RECORDED_ROUNDS * 3):
        validator.record("draft-0", replace(BRANCHES_TASK, epoch=number // 9, round=number, base_len=40 + number))
        answers.append(replace(GOOD, epoch=number // 9, round=number, base_len=40 + number))
    request.round.epoch = 1
    assert {validator.refusal(request, False, "draft-0", message, VOCABULARY) for message in answers} <= {"", LATE}
    request.draft.drafters.clear()
    assert {validator.refusal(of, False, "draft-0", m, VOCABULARY) for m in answers for of in (request, None)} == {LATE}


def test_message_about_an_ended_request_is_late_from_its_drafter_only(cluster: ValidatingCluster) -> None:
    validator = SentTasks()
    validator.record("draft-0", BRANCHES_TASK)
    validator.forget("r")
    verdicts = {sender: validator.refusal(None, False, sender, GOOD, VOCABULARY) for sender in ("draft-0", "draft-1")}
    assert verdicts == {"draft-0": LATE, "draft-1": "request"}


def test_recorded_tasks_are_bounded() -> None:
    sent = SentTasks()
    for number in range(MAX_ENDED_REQUESTS + 5):
        sent.record("draft-0", replace(BRANCHES_TASK, request=f"r{number}"))
        sent.forget(f"r{number}")
    assert len(sent._forgotten) == MAX_ENDED_REQUESTS and not sent._tasks
    for number in range(100):
        sent.record("draft-0", replace(BRANCHES_TASK, request="r9999", round=number))
        sent.record("draft-0", replace(BRANCHES_TASK, request="r9999", base_len=number))
    recorded = sent._tasks["r9999"]["draft-0"]
    assert len(recorded) == MAX_RECORDED_ROUNDS and max(map(len, recorded.values())) <= MAX_RECORDED_ROUNDS + 1


@pytest.mark.parametrize("message", [outcome(), Drafted("r", 0, 1, len(PROMPT) + 1, (7,), WORK), Close("r")])
def test_constantly_invalid_drafter_does_not_change_the_text(message: Message) -> None:
    cluster = ValidatingCluster()

    def falsify(sender: str, original: Message, now_ns: int) -> None:
        request = cluster.rounds._requests.get("r")
        if sender == "draft-0" and request is not None and not isinstance(message, Close):
            at = request.round
            false = replace(message, epoch=at.epoch, round=at.number, base_len=len(request.sequence.tokens))  # type: ignore[call-arg]
            handle("draft-0", false, now_ns)
        elif sender == "draft-0":
            handle("draft-0", message, now_ns)
        handle(sender, original, now_ns)

    handle = intercept(cluster.rounds, falsify)
    cluster.run(PROMPT, 60)
    assert cluster.generated == list(TEXT[10:70])
    assert len(cluster.invalid) > 10


def test_prompt_progress_is_taken_from_the_target_only(cluster: ValidatingCluster) -> None:
    for sender, done in (("draft-0", 3), ("target-0", 4)):
        cluster.rounds.handle([(sender, Prefilled("r", 0, done, 10))], 0)
    assert [event for event in cluster.events if isinstance(event, Progress)] == [Progress("r", 4, 10)]
