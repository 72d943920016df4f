"""Runs one HTTP request's choices at the orchestrator, concurrently, and returns their parts in one order.

The queue is unbounded: a slow reader gets all text since its last read at once, and delays nobody else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.orchestrator.client.base_client import AsyncBaseClient, AsyncStream
from outrider.orchestrator.client.dialogue import Chunk, GenerationResult
from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.clock import MILLISECOND_NS
from outrider.protocol.errors import OutriderError
from outrider.protocol.messages import RoundRecord, Span
from outrider.server import schemas
from outrider.server.answers.parts import NO_EXTRAS, ChoiceState, Extras, KeepAlive, Splitter, StreamItem
from outrider.server.mapping.generation_params import GenerationParams
from outrider.server.metrics import ChoiceTimer
from outrider.server.problems import Refused

T = TypeVar("T")


class NewsQueue(Generic[T]):
    """An unbounded queue for one reader on one event loop, with a timeout on reads.

    `asyncio.timeout` around `Queue.get` would create and cancel a timer for each item. Here one timer stays set, and
    fires no earlier than the timeout could expire.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: list[T] = []
        self._reader: asyncio.Future[None] | None = None
        self._write_now: Callable[[T], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._patience = self._timer_at = self._until = 0.0

    def put(self, one: T) -> None:
        if self._write_now is not None and self._awaited is not None and self._write_now(one):
            self._until = self._loop.time() + self._patience
        else:
            self._items.append(one)
            self._wake()

    async def take(self, patience: float, write_now: Callable[[T], bool] | None = None) -> list[T]:
        """Returns all items, or none after `patience` seconds without a new one.

        Items that arrive during the wait are first passed to `write_now`, in the same turn of the event loop, and are
        queued only if it returns False.
        """
        if not self._items:
            self._write_now = write_now
            await self._arrival(patience)
        found, self._items = self._items, []
        return found

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()

    async def _arrival(self, patience: float) -> None:
        self._patience, self._until = patience, self._loop.time() + patience
        if self._timer is not None and self._until < self._timer_at:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._set_timer()
        self._reader = self._loop.create_future()
        await self._reader

    def _set_timer(self) -> None:
        self._timer_at = self._until
        self._timer = self._loop.call_at(self._timer_at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._until <= self._timer_at:
            self._wake()
        else:
            self._set_timer()  # an item arrived since it was set

    @property
    def _awaited(self) -> asyncio.Future[None] | None:
        """The future that a waiting reader has not yet been woken by."""
        return self._reader if self._reader is not None and not self._reader.done() else None

    def _wake(self) -> None:
        if (reader := self._awaited) is not None:
            reader.set_result(None)


def extras_of(chunk: Chunk, job: ChoiceJob) -> Extras:
    """Returns what `job` requests of a chunk."""
    if chunk.logprobs is None and chunk.origins is None and chunk.rounds is None and not job.params.ids:
        return NO_EXTRAS
    origins: list[schemas.TokenOrigin] = []
    if job.words is not None:
        for token, origin in zip(chunk.token_ids, chunk.origins or (), strict=True):
            text = job.words.feed((token,)).text
            origins.append(schemas.TokenOrigin(text=text, origin=origin.name.lower()))
    return Extras(
        chunk.logprobs or (),
        tuple(origins),
        tuple(map(_round, chunk.rounds or ())),
        chunk.token_ids if job.params.ids else (),
    )


def speculated(extras: Extras) -> schemas.Speculated | None:
    """Returns the `speculation` field of chat and text completions; None if empty."""
    if not extras.origins and not extras.rounds:
        return None
    return schemas.Speculated(origins=list(extras.origins) or None, rounds=list(extras.rounds) or None)


def _round(record: RoundRecord) -> schemas.Round:
    return schemas.Round(
        round=record.round,
        lookup=record.lookup,
        source=record.source,
        drafted=record.drafted,
        accepted=record.accepted,
        tokens=record.tokens,
        verify=schemas.Work(**_times(record.verify)),
        decided=schemas.Work(**_times(record.decided)) if record.decided is not None else None,
        drafting=[
            schemas.Drafting(
                drafter=one.drafter, round=one.round, depth=one.depth, branches=one.branches, **_times(one.work)
            )
            for one in record.drafting
        ],
    )


def _times(span: Span) -> dict[str, float]:
    return {"start_ms": span.started_ns / MILLISECOND_NS, "ms": (span.ended_ns - span.started_ns) / MILLISECOND_NS}


SILENCE_SECONDS = 5.0
"""A stream sends a keep-alive after so long without a result."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceJob:
    """One choice: its prompt and parameters. `words` detokenizes, if token origins are requested."""

    tokens: tuple[int, ...]
    params: GenerationParams
    splitter: Splitter
    words: TextStream | None = None


def job(codec: TextCodec, tokens: tuple[int, ...], params: GenerationParams, splitter: Splitter) -> ChoiceJob:
    """Returns the job of a choice."""
    sampling = params.sampling
    ends = frozenset[int]() if sampling.ignore_eos else codec.eos
    words = TextStream(codec, tokens, sampling.stop, ends) if params.speculation.origins else None
    return ChoiceJob(tokens, params, splitter, words)


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """New text of choice `index`, its tokens and their extras."""

    index: int
    text: str
    tokens: tuple[int, ...]
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """Choice `index` is complete."""

    index: int
    result: GenerationResult


News = ChoiceText | KeepAlive | ChoiceEnded
WriteNow = Callable[[News | Exception], bool]
"""Receives a result while nothing is queued; returns whether it wrote it."""
StartTimer = Callable[[int, ChoiceJob], ChoiceTimer]
"""Starts the timer of a choice, by its index."""


class RequestRun:
    """Starts on creation. Call `next` until `over`, then `close`, which cancels what still runs and releases the
    `place`.

    `one_call`: a choice ends after its first tool call. A choice ends with an error after `longest` seconds, or its own
    timeout. `caller` identifies the user to an orchestrator with several.
    """

    def __init__(
        self,
        client: AsyncBaseClient,
        jobs: Sequence[ChoiceJob],
        one_call: bool,
        watch: StartTimer,
        place: ExitStack,
        longest: float | None,
        caller: str,
    ) -> None:
        self._client = client
        self._one_call = one_call
        self._choices = [ChoiceState(index, job.splitter, one_call) for index, job in enumerate(jobs)]
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
        """Whether all choices are complete and their results were returned."""
        return not self._open and not self._first

    async def begun(self, patience: float) -> None:
        """Waits for the first result, at most `patience` seconds.

        Raises:
            OutriderError: the request failed by then.
        """
        self._first = await self.news(patience)

    async def next(self, write_now: WriteNow | None = None) -> list[StreamItem]:
        """Returns new items, except those that `write_now` took.

        Raises:
            OutriderError: a choice failed, which fails the request.
        """
        first, self._first = self._first, []
        news = first or await self.news(SILENCE_SECONDS, write_now)
        found: list[StreamItem] = [] if news else [KeepAlive("still here")]
        for one in news:
            found += self._items(one)
            if isinstance(one, ChoiceEnded):
                self._open.discard(one.index)
            elif isinstance(one, ChoiceText) and self._choices[one.index].finish and one.index in self._streams:
                await self._streams.pop(one.index).end()  # its result follows
        return found

    async def whole(self) -> list[ChoiceState]:
        """Returns all choices, finished.

        Raises:
            OutriderError: one failed.
        """
        while not self.over:
            await self.next()
        return self._choices

    async def news(self, patience: float, write_now: WriteNow | None = None) -> list[News]:
        """Returns new results in order, except those that `write_now` took; none after `patience` seconds without any.

        Raises:
            OutriderError: a choice failed.
        """
        found: list[News] = []
        for one in await self._line.take(patience, write_now):
            _add(found, one)
        return found

    def text(self, news: News | Exception) -> list[StreamItem] | None:
        """Returns the items of new text. None if `news` is something else, or may end its choice."""
        return self._items(news) if isinstance(news, ChoiceText) and not self._one_call else None

    def _items(self, news: News) -> list[StreamItem]:
        match news:
            case ChoiceText(index=index, text=text, tokens=tokens, extras=extras):
                return self._choices[index].add(text, tokens, extras)
            case ChoiceEnded(index=index, result=result):
                return self._choices[index].end(result)
            case KeepAlive():
                return [news]

    async def close(self) -> None:
        """Cancels unfinished choices, and waits until they are cancelled."""
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
            self._line.put(ChoiceText(index, chunk.text, chunk.token_ids, extras_of(chunk, job)))

        try:
            stream = self._streams[index] = self._stream(job)
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
            self._line.put(failed := error)  # ends the reader's wait
            raise
        finally:
            watch.ended(result, failed)

    def _stream(self, job: ChoiceJob) -> AsyncStream:
        params = job.params
        return self._client.stream(
            job.tokens,
            params.sampling,
            **params.speculation.model_dump(),
            client=self._caller,
            progress=lambda done, total: self._line.put(KeepAlive(f"prompt {done}/{total}")),
        )


def _add(found: list[News], one: News | Exception) -> None:
    """Joins consecutive texts of one choice."""
    if isinstance(one, Exception):
        raise one
    last = found[-1] if found else None
    if isinstance(one, ChoiceText) and isinstance(last, ChoiceText) and one.index == last.index:
        found[-1] = ChoiceText(one.index, last.text + one.text, last.tokens + one.tokens, last.extras + one.extras)
    else:
        found.append(one)
