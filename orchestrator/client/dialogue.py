"""One request seen from the client: what to send, what each answer means, what the result is. No socket in here.

`Client` and `AsyncClient` differ only in how they wait; everything else is this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from outrider.orchestrator.client.result import Chunk, GenerationResult, TokenLogprob, token_logprobs
from outrider.orchestrator.client.wish import Wish
from outrider.orchestrator.failure import as_error
from outrider.protocol import messages
from outrider.protocol.errors import (
    InvalidRequest,
    OtherModel,
    OutriderError,
    ServerBusy,
    ServerStopped,
    WorkerError,
)
from outrider.protocol.messages import Cancel, Done, Failed, Message, Progress, Started
from outrider.protocol.origins import Origin

# So long a text waits for the next server, which loads its models first, and so often its client looks for it.
RECONNECT_SECONDS, RETRY_SECONDS = 120.0, 0.25
# A text goes on elsewhere so often after a server has lost its target for good, or given this text up.
MOST_WORKER_ERRORS = 1


@dataclass(frozen=True, slots=True)
class Lost:
    """Since when nobody answers, on the clock, how many tokens had come by then, and how often somebody was asked."""

    since: float = 0.0
    tokens: int = 0
    tries: int = 0


class Dialogue:
    """One request's exchange with a server, and with the next one where that goes away before the end.

    `sources`: so many servers take turns until one goes on; 1: whoever serves there next; 0: the first one or none.
    """

    def __init__(self, wish: Wish, progress: Callable[[int, int], None] | None = None, sources: int = 0) -> None:
        self.request = f"q{os.urandom(8).hex()}"
        self.opening = wish.message(self.request)
        self.over = False
        self.was_sent = False
        self.is_closed = False
        self._begun = False
        self._progress = progress
        self._sources = sources
        self._lost = Lost()
        self._worker_errors = 0
        self._started: Started | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._origins: list[Origin] = []
        self._done: Done | None = None

    def begin(self) -> None:
        """
        Raises:
            InvalidRequest: the stream was read before, for a second reading would ask for another text; or is closed.
        """
        if self.is_closed:
            raise InvalidRequest("this stream is closed; ask for a new stream")
        if self._begun:
            raise InvalidRequest("this stream has been read already; its text is in `result`, or ask for a new stream")
        self._begun = True

    def retry(self, error: OutriderError) -> float:
        """The server is gone: after so many seconds `opening` may be sent again, and goes on behind what has come.

        Raises:
            OutriderError: `error` itself, where the text is not to go on elsewhere, or no server has come for too long.
        """
        now, had = time.monotonic(), len(self._tokens)
        if self._lost.since == 0.0 or had > self._lost.tokens:
            self._lost = Lost(now, had)
        self._lost = replace(self._lost, tries=self._lost.tries + 1)
        if not self._may_retry(error) or now - self._lost.since > RECONNECT_SECONDS:
            raise error
        self.over = False
        if self._started is not None:
            sampling = replace(self.opening.sampling, seed=self._started.seed)
            self.opening = replace(
                self.opening,
                sampling=sampling,
                said=np.asarray(self._tokens, np.int32),
                shown=sum(map(len, self._texts)),
                fingerprint=self._started.fingerprint,
            )
        return 0.0 if self._lost.tries % self._sources else RETRY_SECONDS

    def _may_retry(self, error: OutriderError) -> bool:
        """Not where all are gone or refuse before anything has come; nor where workers die of it again, as it seems."""
        if type(error) is WorkerError:
            self._worker_errors += 1
        begun = self._tokens or (self.was_sent and not isinstance(error, ServerBusy))
        tried_all = self._lost.tries >= self._sources
        hopeless = isinstance(error, OtherModel) or not begun
        return self._sources > 0 and self._worker_errors <= MOST_WORKER_ERRORS and not (tried_all and hopeless)

    @property
    def state(self) -> str:
        """In words, for a person who looks at a stream."""
        if self._done is not None:
            state = f"finished ({self._done.reason})"
        elif self.is_closed or self.over:
            state = "closed" if self.is_closed else "failed"
        else:
            state = "running" if self._begun else "not started"
        return f"{state}, {len(self._tokens)} token{'' if len(self._tokens) == 1 else 's'}"

    @property
    def farewell(self) -> Cancel:
        return Cancel(self.request)

    def take(self, message: Message) -> Chunk | None:
        """What the reader sees of an answer.

        Raises:
            OutriderError: of the class the server named, when the request failed.
        """
        if isinstance(message, messages.Stats) and not message.known:
            raise ServerStopped("the server restarted and lost this request; send it again")
        if getattr(message, "request", None) != self.request:
            return None
        match message:
            case messages.Chunk():
                return self._grown(message)
            case Started():
                self._started = message
            case Progress(done=done, total=total) if self._progress is not None:
                self._progress(done, total)
            case Done():
                self._done, self.over = message, True
            case Failed(kind=kind, message=sentence):
                self.over = True
                raise as_error(kind, sentence)
        return None

    def _grown(self, message: messages.Chunk) -> Chunk:
        logprobs = None if message.logprobs is None else token_logprobs(message.logprobs)
        self._texts.append(message.text)
        self._tokens.extend(message.token_ids)
        self._logprobs.extend(logprobs or ())
        origins = None if message.origins is None else tuple(map(Origin, message.origins))
        self._origins.extend(origins or ())
        return Chunk(message.text, message.token_ids, logprobs, origins, message.rounds)

    def result(self) -> GenerationResult:
        """The finished completion.

        Raises:
            InvalidRequest: it is not finished.
        """
        done, started = self._done, self._started
        if done is None:
            if self.is_closed:
                raise InvalidRequest("the stream was closed before the text was finished, so it has no result")
            raise InvalidRequest("the text is not finished; read the stream to its end before asking for the result")
        return GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(self._tokens),
            finish_reason=done.reason,
            timings=done.timings,
            seed=started.seed if started else 0,
            mode=started.mode if started else self.opening.mode,
            prompt_tokens=started.prompt_tokens if started else 0,
            model=started.model if started else "",
            draft_model=started.draft_model if started else "",
            notes=tuple(dict.fromkeys((*(started.notes if started else ()), *done.notes))),
            logprobs=tuple(self._logprobs) if self.opening.sampling.logprobs is not None else None,
            origins=tuple(self._origins) if self.opening.origins else None,
        )
