"""The served model: its names, tokenizer and chat template, which convert conversations to tokens.

The orchestrator reads the model's folder in the same way, so tokens mean the same in both.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from outrider.grammar.compiler import Vocabulary, get_vocabulary
from outrider.orchestrator.pairing.chat_template import (
    TOOL_TEMPLATE,
    Message,
    chat_template,
    join_messages,
    render_open,
    render_template,
)
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec, read_default_sampling
from outrider.protocol.digest import read_json
from outrider.protocol.errors import InvalidRequest, ModelError, PromptTooLong
from outrider.server.model import tool_format


@dataclass(frozen=True, slots=True)
class Toolbox:
    """`tools` in OpenAI's format. `required`: at least one call is required. `single`: at most one is allowed.

    `strict`: names of tools whose calls must satisfy their schemas. `guided`: all calls must, because the model's
    template has no tools.
    """

    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False
    single: bool = False
    strict: frozenset[str] = frozenset()
    guided: bool = False

    @property
    def binds(self) -> bool:
        """Whether a grammar constrains calls."""
        return self.required or self.guided or bool(self.strict)


@dataclass(frozen=True, slots=True)
class TemplateInput:
    """A conversation: the input of a chat template, and the tools that the answer may call.

    `answer`: start the assistant's turn. `continue_final`: continue the last message instead.
    """

    messages: Sequence[Message]
    box: Toolbox = Toolbox()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    answer: bool = True
    continue_final: bool = False


class ThinkingMode(Enum):
    """Whether an answer has thinking: never, optionally, or it begins inside thinking."""

    NONE = 1
    OPTIONAL = 2
    BEGUN = 3


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt's tokens."""

    tokens: tuple[int, ...]
    thinking_mode: ThinkingMode = ThinkingMode.NONE


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`names`: accepted model names, the id first. `defaults`: sampling values of generation_config.json.

    `longest_token`: the characters of the longest token. `tools_as_text`: the template does not support tools.
    `tool_template`: the template for conversations with tools, which may be the same.
    """

    names: tuple[str, ...]
    codec: TextCodec
    vocabulary: Vocabulary
    template: str | None
    tool_template: str | None
    thinking: tool_format.SpanTags | None
    tools: tool_format.ToolFormat | None
    defaults: Mapping[str, float]
    longest_token: int
    loaded_at: int
    tools_as_text: bool = False

    @property
    def id(self) -> str:
        return self.names[0]

    @property
    def context_length(self) -> int:
        return self.codec.model.context_length

    def tokenize_text(self, text: str) -> TokenizedPrompt:
        """Tokenizes a text to complete.

        Raises:
            InvalidRequest: it is empty, or certainly too long.
        """
        if not text:
            raise InvalidRequest("the prompt is empty; expected text, or at least one token")
        return TokenizedPrompt(self.encode(text, special=True))

    def tokenize_conversation(self, source: TemplateInput) -> TokenizedPrompt:
        """Applies the chat template and tokenizes. Without a template the text is used as it is (`join_messages`).

        Raises:
            InvalidRequest: there is no message, or the template does not support the input or is missing.
            ModelError: the template rejects these messages.
        """
        if not source.messages:
            raise InvalidRequest("there is no message to answer; expected at least one")
        if self.template is None:
            if source.keywords:
                named = ", ".join(sorted(source.keywords))
                raise InvalidRequest(f"{self.id} has no chat template that takes {named}; leave it out")
            return self.tokenize_text(join_messages(source.messages))
        if (effort := source.keywords.get("reasoning_effort")) is not None:
            source = replace(source, keywords={"enable_thinking": effort != "none", **source.keywords})
        if (enabled := source.keywords.get("enable_thinking")) is not None:  # `thinking`: Granite's and Kimi's name
            source = replace(source, keywords={"thinking": enabled, **source.keywords})
        if source.continue_final:
            text = render_open(lambda of: self._render(replace(source, messages=of)), source.messages)
        else:
            text = self._render(source)
        thinking_mode = self._thinking_mode(text, source)
        if self.thinking is not None and source.keywords.get("enable_thinking") is False:
            if thinking_mode is ThinkingMode.BEGUN:
                text, thinking_mode = f"{text}{self.thinking.end}\n\n", ThinkingMode.NONE
            elif source.answer and not source.continue_final:
                text = text.removesuffix(self.thinking.answer) + self.thinking.answer
        return TokenizedPrompt(self.encode(text, special=False), thinking_mode)

    def _render(self, source: TemplateInput) -> str:
        """Applies the template. If it refuses the messages, their other forms follow (`tool_format.join_turns`)."""
        messages = source.messages
        if self.tools_as_text:
            messages, source = tool_format.tools_as_text(messages, source.box.tools), replace(source, box=Toolbox())
        for form in (list, tool_format.join_turns, lambda of: tool_format.join_turns(of, to_results=True)):
            with suppress(ModelError):
                return self._apply_template(replace(source, messages=form(messages)))
        return self._apply_template(replace(source, messages=tool_format.join_turns(messages, keep_first=False)))

    def _apply_template(self, source: TemplateInput) -> str:
        template = (self.tool_template if source.box.tools else self.template) or ""
        messages, tools = source.messages, self.tools
        if tools is not None and tools.name == "mistral":
            messages = tool_format.with_short_ids(messages)
        elif tools is not None and tools.name == "pythonic" and "tool_calls" not in template:
            messages = tool_format.calls_in_text(messages, tools.tags)
        return render_template(
            template,
            messages,
            self.codec.special,
            tools=list(source.box.tools) or None,
            answer=source.answer and not source.continue_final,
            keywords=source.keywords,
        )

    def encode(self, text: str, special: bool) -> tuple[int, ...]:
        """Tokenizes `text`. Raises PromptTooLong if it is certainly too long, because that would take seconds."""
        room = self.context_length
        if len(text) >= room * self.longest_token:
            raise PromptTooLong(
                f"the prompt is too long: {len(text)} characters are more than {room} tokens; this model's maximum"
                f" context length is {room} tokens, one of them for the answer"
            )
        return self.codec.encode(text, special)

    def _thinking_mode(self, text: str, source: TemplateInput) -> ThinkingMode:
        if self.thinking is None:
            return ThinkingMode.NONE
        start, end = self.thinking.start, self.thinking.end
        begins_turn = source.answer and not source.continue_final
        if begins_turn:  # a tag that a message mentions begins no thinking
            is_open = text.rstrip().endswith(start)
        else:
            own = str(source.messages[-1].get("content") or "") if source.continue_final else text
            is_open = own.rfind(start) > own.rfind(end)
        if is_open:
            return ThinkingMode.BEGUN
        may_begin = begins_turn and source.keywords.get("enable_thinking") is not False
        is_closed = text.rstrip().endswith(self.thinking.answer or end)
        return ThinkingMode.OPTIONAL if may_begin and not is_closed else ThinkingMode.NONE


def load_served_model(name: str, folder: Path, names: tuple[str, ...], tool_fallback: bool = True) -> ServedModel:
    """Loads the model in `folder`, which the orchestrator calls `name`. `names`: those to serve it under; by default
    `name`, for a folder its last component and the whole path.

    `tool_fallback`: describe tools in the system prompt if the template does not support them.

    Raises:
        ModelError: its files can't be read.
    """
    codec, path = load_codec(find_model(str(folder), weights=False)), Path(name).expanduser()
    template = chat_template(folder)
    tool_template = chat_template(folder, TOOL_TEMPLATE) or template
    vocabulary = codec.tokenizer.get_vocab(with_added_tokens=True)
    named = read_json(folder / "tokenizer_config.json").get("tool_parser_type")
    tools = tool_format.find_tool_format(tool_template, vocabulary, named) if template is not None else None
    worded = template is not None and tools is None and tool_fallback
    return ServedModel(
        names=names or ((path.resolve().name, name.rstrip("/")) if path.exists() else (name,)),
        codec=codec,
        vocabulary=get_vocabulary(codec.tokenizer),
        template=template,
        tool_template=tool_template,
        thinking=tool_format.find_thinking_tags(vocabulary) if template is not None else None,
        tools=tool_format.find_tool_format(None, vocabulary, tool_format.FALLBACK_FORMAT) if worded else tools,
        defaults=read_default_sampling(folder),
        longest_token=max(map(len, vocabulary)),
        loaded_at=int(time.time()),
        tools_as_text=worded,
    )
