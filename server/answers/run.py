"""One HTTP request at the orchestrator: its choices run side by side, and their news come in one line.

The line is as long as the texts are: a reader who is late finds what came meanwhile in one piece, and holds nobody up.
Whoever closes the run cancels what is not finished.

`NewsQueue`: what arrives for one reader in asyncio, in order; who waits for it hears of silence, too. Knows one event
loop. A queue within `asyncio.timeout` makes and cancels a timer for each thing that arrives. Here one goes on for as
long as somebody waits now and then, and wakes up no sooner than the silence may be over.

`Extras`: what tokens have beside their text, as far as it was asked for: it grows with them and is told once. Knows
tokens, texts and rounds as the client hands them out; knows no API.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.orchestrator.client.base_client import AsyncBaseClient, AsyncStream
from outrider.orchestrator.client.dialogue import Chunk, GenerationResult, TokenLogprob
from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import DraftWork, RoundRecord, Span
from outrider.protocol.schema import Origin
from outrider.server.mapping.generation_params import GenerationParams
from outrider.server.metrics import ChoiceTimer
from outrider.server.problems import Refused
from outrider.server.shapes import base as shapes

T = TypeVar("T")


class NewsQueue(Generic[T]):
    """As long as it gets: who puts something in never waits."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._things: list[T] = []
        self._reader: asyncio.Future[None] | None = None
        self._at_once: Callable[[T], bool] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._patience = self._rings_at = self._until = 0.0

    def put(self, one: T) -> None:
        if self._at_once is not None and self._awaited is not None and self._at_once(one):
            self._until = self._loop.time() + self._patience
        else:
            self._things.append(one)
            self._wake()

    async def take(self, patience: float, at_once: Callable[[T], bool] | None = None) -> list[T]:
        """All there is; nothing after `patience` seconds in which nothing came.

        What comes while this waits is offered to `at_once` in the very turn of the loop that brings it, and is taken
        only if that returns False.
        """
        if not self._things:
            self._at_once = at_once
            await self._arrival(patience)
        found, self._things = self._things, []
        return found

    def close(self) -> None:
        """Nobody reads any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    async def _arrival(self, patience: float) -> None:
        self._patience, self._until = patience, self._loop.time() + patience
        if self._alarm is not None and self._until < self._rings_at:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._set_alarm()
        self._reader = self._loop.create_future()
        await self._reader

    def _set_alarm(self) -> None:
        self._rings_at = self._until
        self._alarm = self._loop.call_at(self._rings_at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._until <= self._rings_at:
            self._wake()
        else:
            self._set_alarm()  # something has come since it was set

    @property
    def _awaited(self) -> asyncio.Future[None] | None:
        """What a reader waits for who has not been woken yet."""
        return self._reader if self._reader is not None and not self._reader.done() else None

    def _wake(self) -> None:
        if (reader := self._awaited) is not None:
            reader.set_result(None)


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


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceJob:
    """One choice: a prompt's tokens, and how they are completed. `words` spells them out, if their origins are told."""

    tokens: tuple[int, ...]
    params: GenerationParams
    words: TextStream | None = None


def job(codec: TextCodec, tokens: tuple[int, ...], params: GenerationParams) -> ChoiceJob:
    """With what its manner asks for."""
    sampling = params.sampling
    ends = frozenset[int]() if sampling.ignore_eos else codec.eos
    return ChoiceJob(tokens, params, TextStream(codec, tokens, sampling.stop, ends) if params.origins else None)


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """Choice `index` has more text, by `tokens`; `extras` are theirs."""

    index: int
    text: str
    tokens: tuple[int, ...]
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True)
class ChoicePrefill:
    """So much of choice `index`'s prompt has been read."""

    index: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """Choice `index` is finished."""

    index: int
    result: GenerationResult


News = ChoiceText | ChoicePrefill | ChoiceEnded
AtOnce = Callable[[News | Exception], bool]
"""Is offered what comes while nothing waits; whether it took it."""
Watching = Callable[[int, ChoiceJob], ChoiceTimer]
"""What watches a choice, by its index."""


class RequestRun:
    """Begins on creation; `news` until `over`, then `close`, which is right at any time, and gives the `place` back.

    A choice that takes longer than `longest` seconds, or than its own manner says, is given up. `caller`: for whom it
    is, where the asker asks for many.
    """

    def __init__(
        self,
        client: AsyncBaseClient,
        jobs: Sequence[ChoiceJob],
        watch: Watching,
        place: ExitStack,
        longest: float | None,
        caller: str,
    ) -> None:
        self._client = client
        self._caller = caller
        self._watch = watch
        self._place = place
        self._longest = longest
        self._line = NewsQueue[News | Exception]()
        self._first: list[News] = []
        self._open = set(range(len(jobs)))
        self._streams: dict[int, AsyncStream] = {}
        self._tasks = [asyncio.create_task(self._complete(index, job)) for index, job in enumerate(jobs)]

    @property
    def over(self) -> bool:
        """Whether all choices are finished and told."""
        return not self._open and not self._first

    async def begun(self, patience: float) -> None:
        """Returns when there is news, or nothing for `patience` seconds.

        Raises:
            OutriderError: the request was refused, or failed at once.
        """
        self._first = await self.news(patience)

    async def news(self, patience: float, at_once: AtOnce | None = None) -> list[News]:
        """What there is, in order, but for what `at_once` took; empty after `patience` seconds of silence.

        Raises:
            OutriderError: a choice failed; the others are of no use then.
        """
        if self._first:
            first, self._first = self._first, []
            return first
        found: list[News] = []
        for one in await self._line.take(patience, at_once):
            _add(found, one)
        for news in found:
            if isinstance(news, ChoiceEnded):
                self._open.discard(news.index)
        return found

    async def end(self, index: int) -> None:
        """Choice `index` is wanted no further; its end will come at once, with its numbers."""
        if index in self._streams:
            await self._streams.pop(index).end()

    async def close(self) -> None:
        """Cancels what is not finished, and returns when it is cancelled."""
        self._place.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._line.close()

    async def _complete(self, index: int, job: ChoiceJob) -> None:
        watch = self._watch(index, job)
        result: GenerationResult | None = None
        failed: Exception | None = None
        limits = [limit for limit in (job.params.timeout, self._longest) if limit is not None]

        def grown(chunk: Chunk) -> None:
            watch.grown(len(chunk.token_ids))
            self._line.put(ChoiceText(index, chunk.text, chunk.token_ids, extras_of(chunk, job.words, job.params.ids)))

        try:
            stream = self._streams[index] = self._stream(index, job)
            log.info("choice %d is %s", index, stream.request, extra={"client_request": stream.request})
            async with asyncio.timeout(min(limits, default=None)):
                result = await stream.follow(grown)
            self._line.put(ChoiceEnded(index, result))
        except OutriderError as error:
            self._line.put(failed := error)
        except TimeoutError:
            late = f"the answer was not complete after {min(limits):g} s and was cancelled; set a longer timeout"
            self._line.put(failed := Refused(late, "timeout", 504, "timeout"))
        except Exception as error:
            self._line.put(failed := error)  # so that nobody waits for the rest
            raise
        finally:
            watch.ended(result, failed)

    def _stream(self, index: int, job: ChoiceJob) -> AsyncStream:
        params = job.params
        return self._client.stream(
            job.tokens,
            params.sampling,
            mode=params.mode,
            num_draft_tokens=params.num_draft_tokens,
            branches=params.branches,
            origins=params.origins,
            rounds=params.rounds,
            drafter=params.drafter,
            client=self._caller,
            progress=lambda done, total: self._line.put(ChoicePrefill(index, done, total)),
        )


def _add(found: list[News], one: News | Exception) -> None:
    """Texts of one choice that come together are one."""
    if isinstance(one, Exception):
        raise one
    last = found[-1] if found else None
    if isinstance(one, ChoiceText) and isinstance(last, ChoiceText) and one.index == last.index:
        found[-1] = ChoiceText(one.index, last.text + one.text, last.tokens + one.tokens, last.extras + one.extras)
    else:
        found.append(one)
