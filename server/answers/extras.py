"""What tokens have beside their text, as far as it was asked for: it grows with them and is told once.

Knows tokens, texts and rounds as the client hands them out; knows no API.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outrider.orchestrator.client.result import Chunk, TokenLogprob
from outrider.orchestrator.front.text import TextStream
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.messages import DraftWork, RoundRecord, Span
from outrider.protocol.origins import Origin
from outrider.server.shapes import speculated as shapes


@dataclass(frozen=True, slots=True)
class SaidToken:
    """The text that a token completes, often a part of a word, and who said it first."""

    text: str
    origin: Origin


@dataclass(frozen=True, slots=True)
class Extras:
    """Of some tokens in a row."""

    logprobs: tuple[TokenLogprob, ...] = ()
    origins: tuple[SaidToken, ...] = ()
    rounds: tuple[RoundRecord, ...] = ()
    ids: tuple[int, ...] = ()

    def __add__(self, later: Extras) -> Extras:
        return joined((self, later)) if later is not NO_EXTRAS else self


NO_EXTRAS = Extras()


def joined(many: Iterable[Extras]) -> Extras:
    """Of all their tokens."""
    rows = list(many)
    return Extras(
        tuple(one for row in rows for one in row.logprobs),
        tuple(one for row in rows for one in row.origins),
        tuple(one for row in rows for one in row.rounds),
        tuple(one for row in rows for one in row.ids),
    )


def extras_of(chunk: Chunk, words: TextStream | None, with_ids: bool = False) -> Extras:
    """`words` has taken the tokens before; None: nobody asked for texts and origins."""
    if chunk.logprobs is None and chunk.origins is None and chunk.rounds is None and not with_ids:
        return NO_EXTRAS
    said = () if words is None else tuple(_said(chunk, words))
    return Extras(chunk.logprobs or (), said, chunk.rounds or (), chunk.token_ids if with_ids else ())


def _said(chunk: Chunk, words: TextStream) -> Iterator[SaidToken]:
    for token, origin in zip(chunk.token_ids, chunk.origins or (), strict=True):
        yield SaidToken(words.feed((token,)).text, origin)


def speculated(extras: Extras) -> shapes.Speculated | None:
    """As OpenAI's two older APIs have it here; None where there is nothing to tell."""
    if not extras.origins and not extras.rounds:
        return None
    origins = [shapes.TokenOrigin(text=one.text, origin=one.origin.name.lower()) for one in extras.origins]
    return shapes.Speculated(origins=origins or None, rounds=[_round(one) for one in extras.rounds] or None)


def _round(record: RoundRecord) -> shapes.Round:
    return shapes.Round(
        round=record.round,
        lookup=record.lookup,
        source=record.source,
        drafted=record.drafted,
        accepted=record.accepted,
        tokens=record.tokens,
        verify=shapes.Work(**_times(record.verify)),
        decided=shapes.Work(**_times(record.decided)) if record.decided is not None else None,
        drafting=[_work(one) for one in record.drafting],
    )


def _work(one: DraftWork) -> shapes.Drafting:
    return shapes.Drafting(
        drafter=one.drafter, round=one.round, depth=one.depth, branches=one.branches, **_times(one.work)
    )


def _times(span: Span) -> dict[str, float]:
    return {"start_ms": span.started_ns / MILLISECOND_NS, "ms": (span.ended_ns - span.started_ns) / MILLISECOND_NS}
