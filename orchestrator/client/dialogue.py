"""One request in the client: its options, the messages to send, the handling of answers, and the result.

`Client` and `AsyncClient` differ only in how they wait; everything else is here. Knows nothing of sockets.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from msgspec import structs

from outrider.orchestrator.settings import check_setting
from outrider.protocol import messages, values
from outrider.protocol.errors import (
    InvalidRequest,
    OtherModel,
    OutriderError,
    PromptTooLong,
    ServerBusy,
    ServerStopped,
    WorkerError,
    make_error,
)
from outrider.protocol.messages import Done, Failed, Generate, Message, Progress, RoundRecord, Started, Timings
from outrider.protocol.sampling import SamplingFields, SamplingParams
from outrider.protocol.schema import IMPOSSIBLE_LOGPROB, MAX_AXIS_LENGTH, Logprobs, Origin
from outrider.protocol.values import short_repr

MAX_TOKEN_ID = 2**31 - 1
MAX_NAME_LENGTH = 64
Prompt: TypeAlias = str | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]
EMPTY_PROMPT = "the prompt is empty; expected text, or at least one token"

# How long a text waits for the next server, which first loads its models, and how often the client tries to connect.
RECONNECT_SECONDS, RETRY_SECONDS = 120.0, 0.25

# How often a text continues after a WorkerError: its target may be lost for good, or the text itself may cause it.
MAX_WORKER_ERRORS = 1


class GenerateFields(SamplingFields, total=False):
    """The keywords of `generate` and `stream`; see `Client.generate`."""

    mode: str
    num_draft_tokens: int | None
    branches: int | None
    chat_template: bool
    origins: bool
    drafter: str
    client: str


def _check_name(name: str, value: object) -> str:
    text = values.check_unicode(name, value)
    if len(text) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"{name} has {len(text)} characters; expected at most {MAX_NAME_LENGTH}")
    return text


CHECKS: dict[str, values.Check] = {
    **dict.fromkeys(("mode", "num_draft_tokens", "branches"), check_setting),
    **dict.fromkeys(("chat_template", "origins", "rounds"), values.check_bool),
    **dict.fromkeys(("drafter", "client"), _check_name),
}
"""The check of each option, and of `rounds`."""


def generate_message(
    function: str, prompt: Prompt, sampling: SamplingParams | None, rounds: bool, options: Mapping[str, Any]
) -> Generate:
    """Returns the message that starts the request of a call; an option overrides the same field of `sampling`.

    Raises:
        InvalidRequest: a value is of a wrong type or out of range.
        TypeError: an option is unknown; the message names `function`.
    """
    if not options.keys() <= GenerateFields.__annotations__.keys():
        raise values.unknown_keyword_error(function, options, (*GenerateFields.__annotations__, "sampling"))
    if (is_text := isinstance(prompt, str)) and not prompt:
        raise InvalidRequest(EMPTY_PROMPT)
    text, tokens = (values.check_unicode("the prompt", prompt), None) if is_text else (None, _as_tokens(prompt))
    sampling = SamplingParams() if sampling is None else sampling
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest(f"sampling is {values.plain_repr(sampling)}; expected SamplingParams(...)")
    sampling = sampling.changed(**{name: value for name, value in options.items() if name not in CHECKS})
    chosen: dict[str, Any] = {
        name: CHECKS[name](name, value) for name, value in (*options.items(), ("rounds", rounds)) if name in CHECKS
    }
    return Generate(f"q{os.urandom(8).hex()}", text, tokens, sampling, **chosen)


def _as_tokens(prompt: object) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError):  # for example, rows of different lengths
        ids = np.array(None)
    if ids.shape == (0,):
        raise InvalidRequest(EMPTY_PROMPT)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest("the prompt is neither text nor token ids; expected a str or ints; HTTP takes messages")
    if len(ids) > MAX_AXIS_LENGTH:
        raise PromptTooLong(
            f"the prompt is too long: {len(ids)} tokens > {MAX_AXIS_LENGTH} maximum; any model's maximum context"
            f" length is {MAX_AXIS_LENGTH} tokens here"
        )
    if ids.min() < 0 or ids.max() > MAX_TOKEN_ID:
        raise InvalidRequest(f"the prompt has a token id out of range; expected whole numbers from 0 to {MAX_TOKEN_ID}")
    return ids.astype(np.int32)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token's log-probability, and `top`: the likeliest tokens there with theirs, the likeliest first.

    They are the target's, after penalties, bias and grammar, before temperature and filters.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Chunk:
    """New final text, never cut inside a character, and the tokens committed since the last chunk.

    If the request asked for them: `logprobs` and `origins` of each token, `rounds` that committed them.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    origins: tuple[Origin, ...] | None = None
    rounds: tuple[RoundRecord, ...] | None = None

    __repr__ = short_repr


@dataclass(frozen=True, slots=True, repr=False)
class GenerationResult:
    """A finished completion.

    `token_ids` are the generated tokens, including the one that ended the text. `finish_reason` is eos, stop, length or
    cancelled. `mode` is the mode that ran; `seed` reproduces this text. `notes` say why speculation was off, if it was.
    If the request asked for them: `logprobs` and `origins` of each token, `prompt_logprobs` of each token of the prompt
    but the first. The repr leaves out what is stored per token.
    """

    text: str
    token_ids: tuple[int, ...] = field(repr=False)
    finish_reason: str
    timings: Timings = field(repr=False)
    seed: int
    mode: str
    prompt_tokens: int
    model: str
    draft_model: str
    notes: tuple[str, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)
    origins: tuple[Origin, ...] | None = field(default=None, repr=False)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = field(default=None, repr=False)

    __repr__ = short_repr

    def summary(self) -> str:
        """Formats mlx-lm's statistics lines, one line for speculation, and one for each note."""
        times, cached, read = self.timings, self.timings.cache_n, self.timings.prompt_n
        # The rate counts only the tokens that were read.
        in_cache = f" ({cached} cached, {read} read)" if cached else ""
        prompt_rate = 1000.0 * times.prompt_n / times.prompt_ms if times.prompt_ms > 0 else 0.0
        lines = [
            f"Prompt: {pluralize(cached + read, 'token')}{in_cache}, {prompt_rate:.3f} tokens-per-sec",
            f"Generation: {pluralize(times.predicted_n, 'token')}, {times.predicted_per_second:.3f} tokens-per-sec",
            *([f"Peak memory: {times.peak_bytes / 1e9:.3f} GB"] if times.peak_bytes else []),
            f"Speculation: {format_speculation(times, self.mode)}",
        ]
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])


def pluralize(count: int, noun: str) -> str:
    """Formats a number and what it counts."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def to_token_logprobs(logprobs: Logprobs) -> tuple[TokenLogprob, ...]:
    """Converts each row; tokens that a mask excludes are left out of `top`."""
    rows = zip(logprobs.ids.tolist(), logprobs.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(
            ids[0], values[0], tuple((i, v) for i, v in zip(ids[1:], values[1:], strict=True) if v > IMPOSSIBLE_LOGPROB)
        )
        for ids, values in rows
    )


def format_speculation(times: Timings, mode: str) -> str:
    """Formats rounds, drafted and accepted tokens, tokens per round and hits; `mode` is the mode that ran."""
    # Round 0, which reads the prompt and commits one token, is not a decoding round.
    rounds = max(times.rounds - 1, 0)
    if not times.draft_n:
        return "off" if mode == "ar" else f"nothing was drafted in {pluralize(rounds, 'round')}"
    looked_up = times.cache_hits + times.cache_misses
    accepted_from = [f"{count} from {name}" for name, count in times.draft_n_accepted_by.items()]
    per_round = (times.predicted_n - 1) / rounds if rounds else 0.0
    return (
        f"{pluralize(rounds, 'round')}, {times.draft_n} drafted, {times.draft_n_accepted} accepted"
        f" ({_format_share(times.draft_n_accepted, times.draft_n)}), {per_round:.2f} tokens per round,"
        f" {pluralize(times.cache_hits, 'hit')} ({_format_share(times.cache_hits, looked_up)})"
        + (f", {times.cache_late} late" if times.cache_late else "")
        + (f", accepted: {' and '.join(accepted_from)}" if len(accepted_from) > 1 else "")
    )


def _format_share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


class Dialogue:
    """One request's exchange with a server, and with the next one if that server goes away before the end.

    `sources`: how many servers may continue the text, in turn; 1: the next server at the same endpoint; 0: none.
    `cancel`: asks the server that answers, if there is one, to end the text; if `is_closed`, without waiting for it.
    """

    def __init__(
        self, first_message: Generate, progress: Callable[[int, int], None] | None = None, sources: int = 0
    ) -> None:
        self.request = first_message.request
        self.first_message = first_message
        self.over = False
        self.was_sent = False
        self.is_closed = False
        self.is_ending = False
        self.cancel: Callable[[], None] = lambda: None
        self._begun = False
        self._progress = progress
        self._sources = sources
        self._lost_at = 0.0  # when the server was lost, in monotonic seconds; 0: it was not
        self._tokens_when_lost = self._tries = 0
        self._worker_errors = 0
        self._started: Started | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._origins: list[Origin] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self._done: Done | None = None

    def begin(self) -> None:
        """Marks the stream as read. Raises InvalidRequest if it is closed or was read before."""
        if self.is_closed:
            raise InvalidRequest("this stream is closed; ask for a new stream")
        if self._begun:
            raise InvalidRequest("this stream has been read already; its text is in `result`, or ask for a new stream")
        self._begun = True

    def retry(self, error: OutriderError) -> float:
        """Prepares `first_message` to continue after the received tokens; returns the seconds to wait before the send.

        Raises:
            OutriderError: `error` itself, if the text may not continue, or no server was found for too long.
        """
        now, received = time.monotonic(), len(self._tokens)
        if not self._lost_at or received > self._tokens_when_lost:
            self._lost_at, self._tokens_when_lost, self._tries = now, received, 0
        self._tries += 1
        if not self._may_retry(error) or now - self._lost_at > RECONNECT_SECONDS:
            raise error
        self.over = False
        if self._started is not None:
            sampling = replace(self.first_message.sampling, seed=self._started.seed)
            self.first_message = structs.replace(
                self.first_message,
                sampling=sampling,
                resume_tokens=np.asarray(self._tokens, np.int32),
                resume_chars=sum(map(len, self._texts)),
                fingerprint=self._started.fingerprint,
            )
        return 0.0 if self._tries % self._sources else RETRY_SECONDS

    def _may_retry(self, error: OutriderError) -> bool:
        """Returns False if no server took the request, all servers refuse it, or it seems to make workers fail."""
        if type(error) is WorkerError:
            self._worker_errors += 1
        begun = self._tokens or (self.was_sent and not isinstance(error, ServerBusy))
        tried_all = self._tries >= self._sources
        hopeless = isinstance(error, OtherModel) or not begun
        return self._sources > 0 and self._worker_errors <= MAX_WORKER_ERRORS and not (tried_all and hopeless)

    def handle_message(self, message: Message) -> Chunk | None:
        """Handles an answer; returns its chunk, if it has one.

        Raises:
            OutriderError: the request failed; the class is the one that the server reported.
        """
        if isinstance(message, messages.Stats) and not message.known:
            raise ServerStopped("the server was restarted and has lost this request; send it again")
        if getattr(message, "request", None) != self.request:
            return None
        match message:
            case messages.TextChunk():
                return self._append(message)
            case Started():
                self._started = message
            case Progress(done=done, total=total) if self._progress is not None:
                self._progress(done, total)
            case Done():
                self.over = True
                if not self.is_closed:  # it may come while the request is being cancelled
                    self._done = message
            case Failed(kind=kind, message=sentence):
                self.over = True
                raise make_error(kind, sentence)
        return None

    def _append(self, message: messages.TextChunk) -> Chunk:
        logprobs = None if message.logprobs is None else to_token_logprobs(message.logprobs)
        if message.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = to_token_logprobs(message.prompt_logprobs)
        self._texts.append(message.text)
        self._tokens.extend(message.token_ids)
        self._logprobs.extend(logprobs or ())
        self._origins.extend(message.origins or ())
        return Chunk(message.text, message.token_ids, logprobs, message.origins, message.rounds)

    def result(self) -> GenerationResult:
        """Returns the finished completion. Raises InvalidRequest if it is not finished."""
        done = self._done
        if done is None:
            if self.is_closed:
                raise InvalidRequest("the stream was closed before the text was finished, so it has no result")
            raise InvalidRequest("the text is not finished; read the stream to its end before asking for the result")
        started = self._started or Started(self.request, 0, self.first_message.mode, 0, "", "")  # ended in the queue
        return GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(self._tokens),
            finish_reason=done.reason,
            timings=done.timings,
            seed=started.seed,
            mode=started.mode,
            prompt_tokens=started.prompt_tokens,
            model=started.model,
            draft_model=started.draft_model,
            notes=tuple(dict.fromkeys((*started.notes, *done.notes))),
            logprobs=tuple(self._logprobs) if self.first_message.sampling.logprobs is not None else None,
            origins=tuple(self._origins) if self.first_message.origins else None,
            prompt_logprobs=self._prompt_logprobs,
        )
