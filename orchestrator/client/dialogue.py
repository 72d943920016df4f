"""One request seen from the client: what to send, what each answer means, what the result is. No socket in here.

`Client` and `AsyncClient` differ only in how they wait; everything else is this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.orchestrator.client.result import Chunk, GenerationResult
from outrider.orchestrator.failure import as_error
from outrider.orchestrator.settings import MODES, check_branches, check_draft_tokens, check_word
from outrider.protocol import messages
from outrider.protocol.errors import EndpointError, InvalidRequest
from outrider.protocol.messages import Cancel, Done, Failed, Generate, Message, Progress, Started, StatsQuery
from outrider.protocol.sampling import SamplingParams

ASK_AFTER_SECONDS = 1.0
MAX_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Wish:
    """What to generate; see `Client.generate`."""

    prompt: str | Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: str = "auto"
    num_draft_tokens: int | None = None
    branches: int | None = None
    chat_template: bool = True

    def __post_init__(self) -> None:
        _check_prompt(self.prompt)
        check_word("mode", self.mode, MODES)
        if self.num_draft_tokens is not None:
            check_draft_tokens(self.num_draft_tokens)
        if self.branches is not None:
            check_branches(self.branches)

    def message(self, request: str) -> Generate:
        """The request to send. Raises InvalidRequest when the prompt is neither text nor tokens."""
        text = self.prompt if isinstance(self.prompt, str) else None
        return Generate(
            request=request,
            prompt=text,
            tokens=None if text is not None else _as_tokens(self.prompt),
            sampling=self.sampling,
            mode=self.mode,
            num_draft_tokens=self.num_draft_tokens,
            branches=self.branches,
            chat_template=self.chat_template,
        )


class Dialogue:
    """One request's exchange with a server."""

    def __init__(self, wish: Wish, progress: Callable[[int, int], None] | None = None) -> None:
        self.request = f"q{os.urandom(8).hex()}"
        self.opening = wish.message(self.request)
        self.over = False
        self._progress = progress
        self._started: Started | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._done: Done | None = None

    @property
    def farewell(self) -> Cancel:
        return Cancel(self.request)

    def take(self, message: Message) -> Chunk | None:
        """What the reader sees of an answer.

        Raises:
            OutriderError: of the class the server named, when the request failed.
        """
        if getattr(message, "request", None) != self.request:
            return None
        match message:
            case Started():
                self._started = message
            case Progress(done=done, total=total) if self._progress is not None:
                self._progress(done, total)
            case messages.Chunk(text=text, token_ids=token_ids):
                tokens = tuple(int(token) for token in token_ids)
                self._texts.append(text)
                self._tokens.extend(tokens)
                return Chunk(text, tokens)
            case Done():
                self._done, self.over = message, True
            case Failed(kind=kind, message=sentence):
                self.over = True
                raise as_error(kind, sentence)
        return None

    def result(self) -> GenerationResult:
        """The finished completion.

        Raises:
            InvalidRequest: it is not finished.
        """
        done, started = self._done, self._started
        if done is None:
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
            notes=(*(started.notes if started else ()), *done.notes),
        )


class Patience:
    """Tells a server that is busy from one that is gone: asks after a second of silence, gives up after `seconds`."""

    def __init__(self, endpoint: str, seconds: float, alive: Callable[[], None] | None = None) -> None:
        self._endpoint = endpoint
        self._seconds = seconds
        self._alive = alive
        self.heard()

    def heard(self) -> None:
        """Something arrived."""
        self._heard_at = time.monotonic()

    def silent(self) -> StatsQuery:
        """A second went by in silence; what to ask.

        Raises:
            EndpointError: nothing was heard for too long.
            OutriderError: `alive` knows that the server ended.
        """
        if self._alive is not None:
            self._alive()
        if time.monotonic() - self._heard_at > self._seconds:
            raise EndpointError(
                f"nothing answers at {self._endpoint} for {self._seconds:g} s; expected a running `outrider serve`"
            )
        return StatsQuery(f"s{os.urandom(8).hex()}")


def _check_prompt(prompt: str | Sequence[int]) -> None:
    if len(prompt) == 0:
        raise InvalidRequest("the prompt is empty; expected text, or at least one token")
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not Unicode text ({error.reason}); expected UTF-8") from None


def _as_tokens(prompt: str | Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    many = np.asarray(prompt)
    if many.ndim != 1 or many.dtype.kind not in "iu":
        raise InvalidRequest("the prompt is neither text nor token ids; expected a str or a sequence of whole numbers")
    if many.min() < 0 or many.max() > MAX_TOKEN:
        raise InvalidRequest(f"the prompt has a token id out of range; expected whole numbers from 0 to {MAX_TOKEN}")
    return many.astype(np.int32)
