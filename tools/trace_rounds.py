"""Reconstructs the rounds of requests from a cluster's trace and the generated tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from outrider.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Bar:
    """Work on a track, in milliseconds since the first event of the trace; `round` is the round's number."""

    track: str
    name: str
    start: float
    length: float
    round: int
    args: dict[str, Any]


def read_bars(path: Path) -> list[Bar]:
    """Returns the work in a trace file by start time.

    Raises:
        InvalidRequest: the file is not a trace.
    """
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        work = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
        origin = float(work[0]["ts"]) if work else 0.0
        return [
            Bar(
                tracks[event["tid"]],
                event["name"],
                (event["ts"] - origin) / 1000,
                event["dur"] / 1000,
                event["args"].get("round", 0),
                event["args"],
            )
            for event in work
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} is not a trace of Outrider: {error}") from error


@dataclass(frozen=True, slots=True)
class TracedRound:
    """`chain` was verified after `base_len` tokens with the outcome (accepted, bonus).

    `next_hit`: whether the lookup of that outcome found a branch; None without a lookup. `after`: the lookup before
    this round: hit, miss, or start for round 0.
    """

    base_len: int
    chain: tuple[int, ...]
    accepted: int
    bonus: int
    after: str
    next_hit: bool | None


@dataclass(frozen=True, slots=True)
class _TracedVerify:
    """A verify in the trace; `name` is the source of its chain."""

    name: str
    chain: tuple[int, ...]
    accepted: int


def read_rounds(trace: Path, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[TracedRound]]:
    """Returns the rounds of each request. `texts`: prompt and generated tokens, in the order of the requests, which ran
    one at a time.

    Raises:
        InvalidRequest: the trace does not fit the texts.
    """
    requests = list(_split_requests(read_bars(trace)))
    if len(requests) != len(texts):
        raise InvalidRequest(f"{trace} has {len(requests)} requests; expected {len(texts)}")
    return [_build_rounds(verified, *text) for verified, text in zip(requests, texts, strict=True)]


def _split_requests(bars: Sequence[Bar]) -> Iterator[list[_TracedVerify]]:
    """Yields the verifies of each request, OPEN's first."""
    sent: dict[int, tuple[str, tuple[int, ...]]] = {}
    current: list[_TracedVerify] = []
    for bar in sorted(bars, key=lambda bar: bar.start + bar.length):
        if bar.track == "orchestrator" and "tokens" in bar.args:
            sent[bar.round] = (bar.name, tuple(bar.args["tokens"]))
        elif bar.track == "target":
            if bar.round == 0:
                if current:
                    yield current
                current, sent = [], {}
            current.append(_TracedVerify(*sent.get(bar.round, ("start", ())), bar.args["accepted"]))
    if current:
        yield current


def _build_rounds(
    verified: Sequence[_TracedVerify], prompt: Sequence[int], generated: Sequence[int]
) -> list[TracedRound]:
    text, base_len, found = [*prompt, *generated], len(prompt), []
    for this, following in pairwise(verified):
        if base_len + this.accepted >= len(text):
            raise InvalidRequest("the trace continues after the text's end; expected the trace of these texts")
        end = base_len + this.accepted + 1
        # With one token left no chain fits before the bonus, so nothing was looked up.
        hit = following.name == "hit" if len(text) - end > 1 else None
        after = "start" if this.name == "start" else "hit" if this.name == "hit" else "miss"
        found.append(TracedRound(base_len, this.chain, this.accepted, text[end - 1], after, hit))
        base_len = end
    return found
