"""What a client may ask for: the keywords of `generate` and `stream`, and the checked record that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypedDict

import numpy as np

from outrider.orchestrator.settings import MODES, check_branches, check_draft_tokens
from outrider.protocol import values
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Generate
from outrider.protocol.sampling import SamplingFields, SamplingParams

MAX_TOKEN = 2**31 - 1
MAX_CLIENT = 64
Prompt: TypeAlias = str | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]]
EMPTY = "the prompt is empty; expected text, or at least one token"


class Choices(TypedDict, total=False):
    """How a text is to be made besides sampling; see `Client.generate`."""

    mode: str
    num_draft_tokens: int | None
    branches: int | None
    chat_template: bool
    origins: bool
    drafter: str
    client: str


class Wishes(SamplingFields, Choices, total=False):
    """The keywords of `generate` and `stream`."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A prompt, and how it is to go on. Checked, and turned into what is sent, on creation.

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

    @classmethod
    def of(
        cls, function: str, prompt: Prompt, sampling: SamplingParams | None, rounds: bool, wishes: Mapping[str, Any]
    ) -> Wish:
        """What `function`, as its caller knows it, was given; a keyword goes before the same field of `sampling`.

        Raises:
            TypeError: there is no such keyword.
        """
        chosen = {name: value for name, value in wishes.items() if name in Choices.__annotations__}
        fields = {name: value for name, value in wishes.items() if name not in chosen}
        if not fields.keys() <= SamplingFields.__annotations__.keys():
            raise values.unknown_keyword(function, fields, (*Wishes.__annotations__, "sampling"))
        sampling = SamplingParams() if sampling is None else sampling
        if fields and isinstance(sampling, SamplingParams):
            sampling = sampling.changed(**fields)
        return cls(prompt, sampling, rounds=rounds, **chosen)

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
