"""What drafters in the target's process bring, in real rounds: at several K, each alone, on a running cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.orchestrator.client.client import Client
from outrider.orchestrator.core.tuning import Choice, OwnKnown
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import RoundRecord, Timings
from outrider.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Found:
    """A drafter's best K with its tokens per second, and what a token of its chains takes and how well those hold."""

    choice: Choice
    known: OwnKnown


def measure(
    client: Client,
    names: Sequence[str],
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    depths: Sequence[int],
    tell: Callable[[str], None],
) -> Iterator[Found]:
    """Of each that says anything at all."""
    for name in names:
        tried = []
        for depth in depths:
            tell(f"{name}, K = {depth}")
            tried.append(_tried(client, name, texts, sampling, depth))
        best = max(tried, key=lambda found: found.choice.tokens_per_second)
        if tried[-1].known.acceptance:
            yield Found(best.choice, tried[-1].known)  # of the longest chains, which show most of how well they hold


def _tried(client: Client, name: str, texts: Sequence[Sequence[int]], sampling: SamplingParams, depth: int) -> Found:
    timings, rounds = [], list[RoundRecord]()
    for text in texts:
        stream = client.stream(
            text, sampling, mode="sd", num_draft_tokens=depth, drafter=name, chat_template=False, rounds=True
        )
        for chunk in stream:
            rounds += chunk.rounds or ()
        timings.append(stream.result.timings)
    rate = 1000 * sum(one.predicted_n - 1 for one in timings) / sum(one.predicted_ms for one in timings)
    work = [work for one in rounds for work in one.drafting if work.drafter == name and work.depth]
    drafted_ms = sum(one.work.ended_ns - one.work.started_ns for one in work) / MILLISECOND_NS
    known = OwnKnown(name, drafted_ms / max(sum(one.depth for one in work), 1), _acceptance(timings))
    return Found(Choice("sd", depth, 0, rate, True, drafter=name), known)


def _acceptance(timings: Sequence[Timings]) -> tuple[float, ...]:
    """How often each token of a chain held, given that those before it did."""
    held = _sums([one.accepted_by_position for one in timings])
    tried = _sums([one.drafted_by_position for one in timings])
    reached = [*tried[:1], *held[:-1]]
    return tuple(h / r for h, r in zip(held, reached, strict=True) if r)


def _sums(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]
