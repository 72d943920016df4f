"""Who may say what about a request: a word from the wrong worker, or about another round, is dropped and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outrider.drafting.replay import Script
from outrider.orchestrator.events import Admit, Committed, PrefillAt
from outrider.protocol.messages import Branch, Branches, Commit, Drafted, Message, Open, Outcome, Prefilled, Span
from outrider.protocol.sampling import SamplingParams
from tests.orchestrator.cluster_in_process import Cluster

TEXT = tuple(range(1000, 1200))
PROMPT = TEXT[:10]
NONE = Span(0, 1)


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster(TEXT, Script((TEXT,), (0.5,), (1.0,), 4096), ngrams=False)
    made.rounds.begin(Admit("r", PROMPT, SamplingParams(max_tokens=50), "ssd", frozenset()), 0)
    return made


def outcome(**changes: object) -> Outcome:
    return replace(Outcome("r", 0, 0, len(PROMPT), 0, 7, NONE), **changes)  # type: ignore[arg-type]


def branches(**changes: object) -> Branches:
    return replace(Branches("r", 0, 0, len(PROMPT), 1, (Branch((TEXT[10],), (7,)),), NONE), **changes)  # type: ignore[arg-type]


FOREIGN: list[tuple[str, Message]] = [
    ("draft-0", outcome()),
    ("draft-9", outcome()),
    ("target-1", outcome()),
    ("target-0", branches()),
    ("draft-9", branches()),
    ("target-0", Drafted("r", 0, 1, len(PROMPT) + 1, (7,), NONE)),
    ("draft-0", Commit("r", 0, 1, len(PROMPT) + 1, (7,), (), 1, 1)),
    ("target-0", outcome(epoch=1)),
    ("target-0", outcome(round=1)),
    ("target-0", outcome(base_len=len(PROMPT) + 1)),
    ("target-0", outcome(request="another")),
    ("draft-0", branches(epoch=1)),
    ("draft-0", branches(base_len=len(PROMPT) - 1)),
]


@pytest.mark.parametrize(("sender", "message"), FOREIGN, ids=lambda value: getattr(value, "__name__", None))
def test_a_word_that_is_not_its_senders_to_say_changes_nothing(cluster: Cluster, sender: str, message: Message) -> None:
    cluster.rounds.handle(sender, message, 0)
    assert cluster.rounds.stale == 1
    assert not [event for event in cluster.told if isinstance(event, Committed)]
    assert [type(told) for told in cluster.told_target] == [Open]


@pytest.mark.parametrize("message", [outcome(), Drafted("r", 0, 1, len(PROMPT) + 1, (7,), NONE)])
def test_a_drafter_that_speaks_for_the_target_does_not_change_the_text(message: Message) -> None:
    cluster = Cluster(TEXT, Script((TEXT,), (0.7,), (1.0,), 4096))
    handle: Callable[..., None] = cluster.rounds.handle

    def lies(sender: str, said: Message, now_ns: int) -> None:
        request = cluster.rounds._requests.get("r")
        if sender == "draft-0" and request is not None:
            lie = replace(message, epoch=request.epoch, round=request.round, base_len=len(request.tokens))  # type: ignore[call-arg]
            handle("draft-0", lie, now_ns)
        handle(sender, said, now_ns)

    cluster.rounds.handle = lies  # type: ignore[method-assign]
    cluster.run(PROMPT, 60)
    assert cluster.generated == list(TEXT[10:70])


def test_only_the_target_tells_how_far_the_prompt_is_read(cluster: Cluster) -> None:
    for sender, done in (("draft-0", 3), ("target-0", 4)):
        cluster.rounds.handle(sender, Prefilled("r", 0, done, 10), 0)
    assert [event for event in cluster.told if isinstance(event, PrefillAt)] == [PrefillAt("r", 4, 10)]
