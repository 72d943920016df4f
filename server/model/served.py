"""The model that is served: its names, its text side, and conversations as the tokens that it answers.

Reads the model's folder as the orchestrator does, so that both mean the same tokens. Knows no request's shape.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from outrider.grammar.compiler import Vocabulary, vocabulary_of
from outrider.orchestrator.pairing.model_files import EMBEDDED_TARGET, find_model, read_json
from outrider.orchestrator.pairing.tokenizer import (
    Message,
    TextCodec,
    as_text,
    chat_template,
    load_codec,
    render,
    without_end,
)
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.server.model.tool_format import FORMAT, NOTE, SpanTags, ToolFormat, in_words, thinking_tags, tool_format

EMBEDDED = "outrider-embedded"
_DEFAULTS = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p"}


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """What is said so far, as templates take it, and how the answer begins.

    `tools` are functions in OpenAI's shape. `answer`: begin the assistant's turn; `go_on`: continue the last message
    instead.
    """

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    answer: bool = True
    go_on: bool = False


class Thoughts(Enum):
    """Whether an answer has thoughts: none, as the model likes, or it begins inside one."""

    NONE = 1
    FREE = 2
    BEGUN = 3


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """What the model reads."""

    tokens: tuple[int, ...]
    thoughts: Thoughts = Thoughts.NONE


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names`: what requests may call it, its id first. `defaults`: sampling that the model's authors recommend.

    `longest_token`: no token stands for more characters. `tools_in_words`: the template has none for `tools`.
    """

    names: tuple[str, ...]
    codec: TextCodec
    vocabulary: Vocabulary
    template: str | None
    thinking: SpanTags | None
    tools: ToolFormat | None
    defaults: Mapping[str, float]
    longest_token: int
    loaded_at: int
    tools_in_words: bool = False

    @property
    def id(self) -> str:
        return self.names[0]

    @property
    def note(self) -> str:
        """What a user of the model should know."""
        return NOTE if self.tools_in_words else ""

    @property
    def context_length(self) -> int | None:
        return self.codec.model.context_length

    def plain(self, text: str) -> TokenizedPrompt:
        """A text that is to be completed.

        Raises:
            InvalidRequest: it is empty or no Unicode.
        """
        if not text:
            raise InvalidRequest("the prompt is empty; expected text, or at least one token")
        return TokenizedPrompt(self._fitting(text, special=True))

    def tokens(self, text: str, special: bool) -> tuple[int, ...]:
        """The tokens of `text`; `special` adds what the tokenizer puts around one. Raises InvalidRequest."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the prompt is not Unicode text ({error.reason}); expected UTF-8") from None
        return self.codec.encode(text, special)

    def prompt(self, talk: TemplateInput) -> TokenizedPrompt:
        """A conversation that is to be answered. Without a template it is the text alone (`as_text`).

        Raises:
            InvalidRequest: something is asked of the template that it can't do, or there is none.
            ModelError: the template refuses these messages.
        """
        if self.template is None:
            return self._without_template(talk)
        text = self._in_words(self.template, talk) if self.tools_in_words else self._rendered(self.template, talk)
        if talk.go_on:
            text = without_end(text, str(talk.messages[-1].get("content") or ""))
        thoughts = self._thoughts(text, talk)
        if thoughts is Thoughts.BEGUN and self.thinking is not None and talk.keywords.get("enable_thinking") is False:
            text, thoughts = f"{text}{self.thinking.end}\n\n", Thoughts.NONE
        return TokenizedPrompt(self._fitting(text, special=False), thoughts)

    def _rendered(self, template: str, talk: TemplateInput) -> str:
        return render(
            template,
            talk.messages,
            self.codec.special,
            tools=list(talk.tools) or None,
            answer=talk.answer and not talk.go_on,
            keywords=talk.keywords,
        )

    def _in_words(self, template: str, talk: TemplateInput) -> str:
        plain = replace(talk, messages=in_words(talk.messages, talk.tools), tools=())
        try:
            return self._rendered(template, plain)
        except ModelError:
            if not talk.tools or talk.messages[0]["role"] == "system":
                raise
        told = in_words(talk.messages, talk.tools, in_system=False)  # some templates refuse system messages
        return self._rendered(template, replace(plain, messages=told))

    def _fitting(self, text: str, special: bool) -> tuple[int, ...]:
        """The tokens of `text`, which is not tokenized at all where it would surely be too long: that takes seconds."""
        room = self.context_length
        if room is not None and len(text) >= room * self.longest_token:
            raise InvalidRequest(
                f"the prompt has {len(text)} characters, more than {room} tokens; expected at most {room - 1}, one less"
                f" than the model's context of {room}"
            )
        return self.tokens(text, special)

    def _without_template(self, talk: TemplateInput) -> TokenizedPrompt:
        if talk.tools:
            raise InvalidRequest(f"{self.id} has no chat template, so it can't use tools; leave out tools")
        if talk.keywords:
            raise InvalidRequest(f"{self.id} has no chat template; leave out the template's arguments")
        return self.plain(as_text(talk.messages))

    def _thoughts(self, text: str, talk: TemplateInput) -> Thoughts:
        if self.thinking is None:
            return Thoughts.NONE
        if text.rfind(self.thinking.start) > text.rfind(self.thinking.end):
            return Thoughts.BEGUN
        begins = talk.answer and not talk.go_on and not text.rstrip().endswith(self.thinking.end)
        return Thoughts.FREE if begins and talk.keywords.get("enable_thinking") is not False else Thoughts.NONE


def load_served(name: str, folder: Path, names: tuple[str, ...], tool_fallback: bool = True) -> ServedModel:
    """The model in `folder`, which the orchestrator calls `name`; `names`: what else it is to be called.

    `tool_fallback`: a model whose template has no tools is told of them in words.

    Raises:
        ModelError: its files can't be read.
    """
    codec = load_codec(find_model(str(folder), weights=False))
    template = chat_template(folder)
    vocabulary = codec.tokenizer.get_vocab(with_added_tokens=True)
    named = read_json(folder / "tokenizer_config.json").get("tool_parser_type")
    tools = tool_format(template, vocabulary, named) if template is not None else None
    worded = template is not None and tools is None and tool_fallback
    return ServedModel(
        names=names or own_names(name, folder),
        codec=codec,
        vocabulary=vocabulary_of(codec.tokenizer),
        template=template,
        thinking=thinking_tags(vocabulary) if template is not None else None,
        tools=tool_format(template, vocabulary, FORMAT) if worded else tools,
        defaults=_recommended(folder),
        longest_token=max(map(len, vocabulary)),
        loaded_at=int(time.time()),
        tools_in_words=worded,
    )


def own_names(name: str, folder: Path) -> tuple[str, ...]:
    """A Hugging Face id as it is; a folder's last word, and the whole of it."""
    if folder == EMBEDDED_TARGET:
        return (EMBEDDED, name)
    path = Path(name).expanduser()
    return (path.resolve().name, name) if path.exists() else (name,)


def _recommended(folder: Path) -> dict[str, float]:
    config = read_json(folder / "generation_config.json")
    if not config.get("do_sample", True):
        return {}
    found = {ours: config.get(theirs) for theirs, ours in _DEFAULTS.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and value is not True}
