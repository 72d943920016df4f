"""One HTTP request at the orchestrator: its choices run side by side, and their news come in one line.

The line is as long as the texts are: a reader who is late finds what came meanwhile in one piece, and holds nobody up.
Whoever closes the run cancels what is not finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from outrider.orchestrator.client.async_asker import AsyncAsker, AsyncStream
from outrider.orchestrator.client.result import Chunk, GenerationResult
from outrider.orchestrator.front.text import TextStream
from outrider.orchestrator.pair.tokenizer import TextCodec
from outrider.protocol.errors import OutriderError
from outrider.server.answers.extras import NO_EXTRAS, Extras, extras_of
from outrider.server.answers.line import Line
from outrider.server.mapping.manner import Manner
from outrider.server.metrics import Watch
from outrider.server.problems import Refused

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One choice: a prompt's tokens, and how they are completed. `words` spells them out, if their origins are told."""

    tokens: tuple[int, ...]
    manner: Manner
    words: TextStream | None = None


def job(codec: TextCodec, tokens: tuple[int, ...], manner: Manner) -> Job:
    """With what its manner asks for."""
    sampling = manner.sampling
    ends = frozenset[int]() if sampling.ignore_eos else codec.eos
    return Job(tokens, manner, TextStream(codec, tokens, sampling.stop, ends) if manner.origins else None)


@dataclass(frozen=True, slots=True)
class Grown:
    """Choice `index` has more text, by `tokens`; `extras` are theirs."""

    index: int
    text: str
    tokens: tuple[int, ...]
    extras: Extras = NO_EXTRAS


@dataclass(frozen=True, slots=True)
class Reading:
    """So much of choice `index`'s prompt has been read."""

    index: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ended:
    """Choice `index` is finished."""

    index: int
    result: GenerationResult


News = Grown | Reading | Ended
AtOnce = Callable[[News | Exception], bool]
"""Is offered what comes while nothing waits; whether it took it."""
Watching = Callable[[int, Job], Watch]
"""What watches a choice, by its index."""


class Run:
    """Begins on creation; `news` until `over`, then `close`, which is right at any time, and gives the `place` back.

    A choice that takes longer than `longest` seconds, or than its own manner says, is given up. `caller`: for whom it
    is, where the asker asks for many.
    """

    def __init__(
        self,
        asker: AsyncAsker,
        jobs: Sequence[Job],
        watch: Watching,
        place: ExitStack,
        longest: float | None,
        caller: str,
    ) -> None:
        self._asker = asker
        self._caller = caller
        self._watch = watch
        self._place = place
        self._longest = longest
        self._line = Line[News | Exception]()
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
            if isinstance(news, Ended):
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

    async def _complete(self, index: int, job: Job) -> None:
        watch = self._watch(index, job)
        result: GenerationResult | None = None
        failed: Exception | None = None
        limits = [limit for limit in (job.manner.timeout, self._longest) if limit is not None]

        def grown(chunk: Chunk) -> None:
            watch.grown(len(chunk.token_ids))
            self._line.put(Grown(index, chunk.text, chunk.token_ids, extras_of(chunk, job.words, job.manner.ids)))

        try:
            stream = self._streams[index] = self._stream(index, job)
            log.info("choice %d is %s", index, stream.request, extra={"client_request": stream.request})
            async with asyncio.timeout(min(limits, default=None)):
                result = await stream.follow(grown)
            self._line.put(Ended(index, result))
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

    def _stream(self, index: int, job: Job) -> AsyncStream:
        manner = job.manner
        return self._asker.stream(
            job.tokens,
            manner.sampling,
            mode=manner.mode,
            num_draft_tokens=manner.num_draft_tokens,
            branches=manner.branches,
            origins=manner.origins,
            rounds=manner.rounds,
            drafter=manner.drafter,
            client=self._caller,
            progress=lambda done, total: self._line.put(Reading(index, done, total)),
        )


def _add(found: list[News], one: News | Exception) -> None:
    """Texts of one choice that come together are one."""
    if isinstance(one, Exception):
        raise one
    last = found[-1] if found else None
    if isinstance(one, Grown) and isinstance(last, Grown) and one.index == last.index:
        found[-1] = Grown(one.index, last.text + one.text, last.tokens + one.tokens, last.extras + one.extras)
    else:
        found.append(one)
