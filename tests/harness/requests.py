"""Sends requests through the client at given times, cancels some of them, and records when each chunk arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from outrider.bench.comparison.runs import Arrival, Reply
from outrider.orchestrator.client.client import BaseClient
from outrider.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class FullReply(Reply):
    """A finished request with its tokens, its text and its finish reason. `cancelled`: the client cancelled it."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: str = ""
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request that is sent after `after` seconds and cancelled after `until` tokens (None: never).

    `num_draft_tokens`, `branches`: K and B (None: the server's).
    """

    tokens: tuple[int, ...]
    sampling: SamplingParams
    mode: str
    after: float = 0.0
    until: int | None = None
    num_draft_tokens: int | None = None
    branches: int | None = None


def send(
    client: BaseClient, request: TimedRequest, on_arrival: Callable[[Arrival], None] = lambda _: None
) -> FullReply:
    """Sends one request; calls `on_arrival` with each arrival."""
    time.sleep(request.after)
    sent = time.perf_counter()
    stream = client.stream(
        request.tokens,
        request.sampling,
        mode=request.mode,
        num_draft_tokens=request.num_draft_tokens,
        branches=request.branches,
    )
    arrivals: list[Arrival] = []
    token_ids: list[int] = []
    texts: list[str] = []
    for chunk in stream:
        if chunk.token_ids:
            arrivals.append(Arrival(time.perf_counter(), len(chunk.token_ids)))
            on_arrival(arrivals[-1])
        token_ids += chunk.token_ids
        texts.append(chunk.text)
        if request.until is not None and len(token_ids) >= request.until:
            return FullReply(sent, tuple(arrivals), tuple(token_ids), "".join(texts), "cancelled", True)
    result = stream.result
    return FullReply(sent, tuple(arrivals), result.token_ids, result.text, result.finish_reason)


def send_all(client: BaseClient, requests: Sequence[TimedRequest], slots: int | None = None) -> Iterator[FullReply]:
    """Sends all requests, at most `slots` at once (None: all), and yields the replies in the order of the requests.

    Nothing is sent before the first reply is requested.
    """
    with ThreadPoolExecutor(slots or len(requests)) as threads:
        yield from threads.map(lambda request: send(client, request), requests)


def longest_wait(arrivals: Sequence[Arrival], since: float) -> float:
    """Returns the longest wait for a chunk after this time, in seconds; 0 if all had arrived before."""
    times = [since, *(arrival.at for arrival in arrivals if arrival.at > since)]
    return max((after - before for before, after in pairwise(times)), default=0.0)
