"""Asks a server for texts as a client does, alone or many at once, and keeps when each chunk came."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from outrider.bench.crowd.reply import Arrival, Reply
from outrider.orchestrator.client.asker import Asker
from outrider.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Question:
    """What one client asks for, `after` so many seconds; it leaves once it has `until` tokens, None: at the end. K and
    B None: the server's own."""

    tokens: tuple[int, ...]
    sampling: SamplingParams
    mode: str
    after: float = 0.0
    until: int | None = None
    num_draft_tokens: int | None = None
    branches: int | None = None


def ask(client: Asker, question: Question, heard: Callable[[Arrival], None] = lambda _: None) -> Reply:
    """One request; `heard` is told of each chunk as it comes."""
    time.sleep(question.after)
    sent = time.perf_counter()
    stream = client.stream(
        question.tokens,
        question.sampling,
        mode=question.mode,
        num_draft_tokens=question.num_draft_tokens,
        branches=question.branches,
    )
    arrivals: list[Arrival] = []
    token_ids: list[int] = []
    texts: list[str] = []
    for chunk in stream:
        if chunk.token_ids:
            arrivals.append(Arrival(time.perf_counter(), len(chunk.token_ids)))
            heard(arrivals[-1])
        token_ids += chunk.token_ids
        texts.append(chunk.text)
        if question.until is not None and len(token_ids) >= question.until:
            return Reply(sent, tuple(arrivals), tuple(token_ids), "".join(texts), "cancelled", True)
    result = stream.result
    return Reply(sent, tuple(arrivals), result.token_ids, result.text, result.finish_reason)


def ask_all(client: Asker, questions: Sequence[Question], places: int | None = None) -> Iterator[Reply]:
    """All at once, each `after` its time, or so many at once: who is answered, or has left, makes room for the next.

    The replies come in the questions' order; asking begins with the first that is wanted.
    """
    with ThreadPoolExecutor(places or len(questions)) as threads:
        yield from threads.map(lambda question: ask(client, question), questions)
