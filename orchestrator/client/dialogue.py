"""One request seen from the client: what to send, what each answer means, what the result is. No socket in here.

`Client` and `AsyncClient` differ only in how they wait; everything else is this.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from outrider.orchestrator.client.result import Chunk, GenerationResult, TokenLogprob, token_logprobs
from outrider.orchestrator.failure import as_error
from outrider.orchestrator.settings import MODES, check_branches, check_draft_tokens
from outrider.protocol import messages, values
from outrider.protocol.errors import (
    EndpointError,
    InvalidRequest,
    OtherModel,
    OutriderError,
    ServerBusy,
    ServerStopped,
    WorkerError,
)
from outrider.protocol.keyring import Keyring
from outrider.protocol.keys import ClientKeys
from outrider.protocol.knock import knock, require_server
from outrider.protocol.messages import Cancel, Done, Failed, Generate, Message, Progress, Started, StatsQuery
from outrider.protocol.origins import Origin
from outrider.protocol.sampling import SamplingParams

ASK_AFTER_SECONDS = 1.0
# So long a text waits for the next server, which loads its models first, and so often its client looks for it.
RECONNECT_SECONDS, RETRY_SECONDS = 120.0, 0.25
# A text goes on elsewhere so often after a server has lost its target for good, or given this text up.
MOST_WORKER_ERRORS = 1
MAX_TOKEN = 2**31 - 1
MAX_CLIENT = 64
Prompt: TypeAlias = str | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]
EMPTY = "the prompt is empty; expected text, or at least one token"


@dataclass(frozen=True, slots=True)
class Wish:
    """What to generate; see `Client.generate`. Checked, and turned into what is sent, on creation.

    Raises:
        InvalidRequest: something is of a wrong kind or out of range.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    mode: str = "auto"
    num_draft_tokens: int | None = None
    branches: int | None = None
    chat_template: bool = True
    origins: bool = False
    rounds: bool = False
    drafter: str = ""
    client: str = ""

    def __post_init__(self) -> None:
        self._keep("prompt", _as_text(self.prompt) if isinstance(self.prompt, str) else _as_tokens(self.prompt))
        if not isinstance(self.sampling, SamplingParams):
            raise InvalidRequest(f"sampling is {self.sampling!r}; expected SamplingParams(...)")
        self._keep("mode", values.word("mode", self.mode, MODES))
        if self.num_draft_tokens is not None:
            self._keep("num_draft_tokens", check_draft_tokens(self.num_draft_tokens))
        if self.branches is not None:
            self._keep("branches", check_branches(self.branches))
        self._keep("chat_template", values.flag("chat_template", self.chat_template))
        self._keep("origins", values.flag("origins", self.origins))
        self._keep("rounds", values.flag("rounds", self.rounds))
        self._keep("drafter", values.text("drafter", self.drafter))
        self._keep("client", values.text("client", self.client))
        if len(self.client) > MAX_CLIENT:
            raise InvalidRequest(f"client has {len(self.client)} characters; expected at most {MAX_CLIENT}")

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the record is frozen for everybody else

    def message(self, request: str) -> Generate:
        """The request to send to a first server."""
        return Generate(
            request=request,
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            tokens=None if isinstance(self.prompt, str) else np.asarray(self.prompt, np.int32),
            sampling=self.sampling,
            mode=self.mode,
            num_draft_tokens=self.num_draft_tokens,
            branches=self.branches,
            chat_template=self.chat_template,
            origins=self.origins,
            rounds=self.rounds,
            drafter=self.drafter,
            client=self.client,
        )


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
            InvalidRequest: the stream was read before; a second reading would ask the server for another text.
        """
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
            said, fingerprint = np.asarray(self._tokens, np.int32), self._started.fingerprint
            self.opening = replace(self.opening, sampling=sampling, said=said, fingerprint=fingerprint)
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
    def farewell(self) -> Cancel:
        return Cancel(self.request)

    def take(self, message: Message) -> Chunk | None:
        """What the reader sees of an answer.

        Raises:
            OutriderError: of the class the server named, when the request failed.
        """
        if isinstance(message, messages.Stats) and not message.known:
            raise ServerStopped("the server was started anew while it was asked, and knows nothing of it; ask again")
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
        tokens = tuple(message.token_ids.tolist())
        logprobs = None if message.logprobs is None else token_logprobs(message.logprobs)
        self._texts.append(message.text)
        self._tokens.extend(tokens)
        self._logprobs.extend(logprobs or ())
        origins = None if message.origins is None else tuple(map(Origin, message.origins))
        self._origins.extend(origins or ())
        return Chunk(message.text, tokens, logprobs, origins, message.rounds)

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
            notes=tuple(dict.fromkeys((*(started.notes if started else ()), *done.notes))),
            logprobs=tuple(self._logprobs) if self.opening.sampling.logprobs is not None else None,
            origins=tuple(self._origins) if self.opening.origins else None,
        )


class Patience:
    """Tells a server that is busy from one that is gone: asks after some silence, gives up `seconds` after that.

    Raises:
        EndpointError: nobody serves the endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        seconds: float,
        alive: Callable[[], None] | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._seconds = seconds
        self._alive = alive
        self.heard()
        self._look()

    @property
    def poll_ms(self) -> int:
        """How long to wait for something to arrive before `silent` is called."""
        return max(int(1000 * min(ASK_AFTER_SECONDS, self._seconds / 2)), 1)

    def heard(self) -> None:
        """Something arrived."""
        self._asked = 0

    def silent(self, about: str | None = None) -> StatsQuery:
        """Nothing arrived for `poll_ms`; what to ask, `about` a request that should be there.

        Raises:
            EndpointError: nobody serves the endpoint any more, or a question was not answered for too long.
            KeyFault: it is served, but not to this side's key.
            OutriderError: `alive` knows that the server ended.
        """
        self._look()
        if self._asked == 1 and self._endpoint.startswith("tcp:"):
            knock(self._endpoint, self._keys)
        self._asked += 1  # counted, not timed: who is stopped asks nothing, and nobody owes it an answer
        if (self._asked - 1) * self.poll_ms > 1000 * self._seconds:
            raise EndpointError(
                f"nothing answers at {self._endpoint} for {self._seconds:g} s; expected a running `outrider serve`"
            )
        return StatsQuery(f"s{os.urandom(8).hex()}", about)

    def _look(self) -> None:
        if self._alive is not None:
            self._alive()
        require_server(self._endpoint)


def keys_to(endpoint: str, server_key: str | None, folder: str | os.PathLike[str] | None) -> ClientKeys | None:
    """The keys that a client needs there; None: it needs none.

    Raises:
        KeyFault: it does, and one is missing or can't be used.
        EndpointError: it is no endpoint.
    """
    return Keyring(Path(folder) if folder is not None else None).to_reach(endpoint, server_key)


def check_timeout(seconds: object) -> float:
    """A client's patience. Raises InvalidRequest when it is no time to wait."""
    return values.number("timeout", seconds, 0.001, math.inf)


def _as_text(prompt: str) -> str:
    if not prompt:
        raise InvalidRequest(EMPTY)
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the prompt is not Unicode text ({error.reason}); expected UTF-8") from None
    return values.plain(prompt)


def _as_tokens(prompt: object) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    try:
        many = np.asarray(prompt)
    except (TypeError, ValueError):  # rows of different lengths, say
        many = np.array(None)
    if many.shape == (0,):
        raise InvalidRequest(EMPTY)
    if many.ndim != 1 or many.dtype.kind not in "iu":
        raise InvalidRequest("the prompt is neither text nor token ids; expected a str or a sequence of whole numbers")
    if many.min() < 0 or many.max() > MAX_TOKEN:
        raise InvalidRequest(f"the prompt has a token id out of range; expected whole numbers from 0 to {MAX_TOKEN}")
    return many.astype(np.int32)
