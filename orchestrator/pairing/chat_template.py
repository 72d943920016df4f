"""Chat templates: turn a conversation into the prompt that a model was trained to answer.

Templates come with models, so they run in Jinja's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from outrider.protocol.digest import read_json
from outrider.protocol.errors import InvalidRequest, ModelError, first_line

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

JINJA_FILE = "chat_template.jinja"
TOOL_TEMPLATE = "tool_use"
"""The name that a model's template for conversations with tools has if it is not the default one."""
_DEFAULT_NAME, _NAMED_FOLDER = "default", "additional_chat_templates"
Message: TypeAlias = Mapping[str, Any]
"""A message as templates expect it: `role` and `content`, and optionally `tool_calls`, `tool_call_id`, `name`, ..."""
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""The variables that `render_template` sets itself, which a caller's keyword may not replace."""
_END_MARK = "\ue000\ue001\ue000"  # private characters, which no template writes or changes


def chat_template(folder: Path, name: str = _DEFAULT_NAME) -> str | None:
    """Returns the chat template of this name in a model's folder, where transformers looks; None if there is none.

    Raises:
        ModelError: its file can't be read, or it is code of mlx-lm instead.
    """
    file = folder / (JINJA_FILE if name == _DEFAULT_NAME else f"{_NAMED_FOLDER}/{name}.jinja")
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"{file} can't be read as text ({error}); download the model again") from None
    for config in ("chat_template.json", "tokenizer_config.json"):
        fields = read_json(folder / config)
        if (template := _named_template(fields.get("chat_template"), name)) is not None:
            return template
        if name == _DEFAULT_NAME and (code := fields.get("chat_template_type")):
            raise ModelError(f"{folder} has no chat template, only code of mlx-lm ({code}); add {JINJA_FILE} there")
    return None


def render_template(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    answer: bool = True,
    keywords: Mapping[str, Any] | None = None,
) -> str:
    """Renders `messages` with the template; `answer` appends the beginning of an answer (add_generation_prompt).

    `tools` are functions in OpenAI's shape, `keywords` further variables of this template, such as enable_thinking.

    Raises:
        InvalidRequest: a keyword has the name of a variable that is always set.
        ModelError: the template refuses the messages, or is broken.
    """
    given = {**special, **(keywords or {})}
    if taken := RESERVED_VARIABLES.intersection(given):
        raise InvalidRequest(f"the chat template keyword {min(taken)} is reserved; rename it")
    try:
        return _compile_template(template).render(
            messages=[_to_template_fields(one) for one in messages],
            add_generation_prompt=answer,
            tools=tools,
            documents=None,
            **given,
        )
    except Exception as error:  # a template is a program that comes with a model
        raise ModelError(
            f"the model's chat template failed ({first_line(error)}); expected a template that takes these messages, or"
            " none (--ignore-chat-template)"
        ) from None


def _to_template_fields(message: Message) -> Message:
    """Returns a message with its thinking under both names that templates read, as in transformers.

    An answer of gpt-oss with all its channels counts from the final one, because its template refuses the others.
    """
    thought = next((message[name] for name in ("reasoning_content", "thinking") if message.get(name)), None)
    fields = {**message, "reasoning_content": thought, "thinking": thought} if thought else message
    content = message.get("content")
    if message.get("role") == "assistant" and isinstance(content, str) and content.startswith("<|channel|>"):
        _, found, answer = content.rpartition("<|channel|>final<|message|>")
        fields = {**fields, "content": answer if found else ""}
    return fields


def render_open(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> str:
    """Renders a conversation up to the end of its last message's text, so that the model continues that text.

    A second rendering with a mark at the end of the text shows what the template writes after it.

    Raises:
        InvalidRequest: the text is empty, or the template has changed it, so that its end can't be found.
    """
    last = messages[-1]
    text = str(last.get("content") or "")
    rendered = render(messages)
    _, mark, after = render([*messages[:-1], {**last, "content": text + _END_MARK}]).rpartition(_END_MARK)
    if not (text.strip() and mark and rendered.endswith(after)):
        raise InvalidRequest("the final message can't be continued: its text is empty, or the chat template changes it")
    return rendered.removesuffix(after)


@lru_cache(maxsize=4)
def _compile_template(template: str) -> Template:
    from jinja2 import TemplateError  # deferred: many models have no template
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Ignores the tags around answers, which mark the text to train on."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _named_template(value: object, name: str) -> str | None:
    entries = value if isinstance(value, list) else [{"name": _DEFAULT_NAME, "template": value}]
    named = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
    template = named.get(name)
    return template if isinstance(template, str) else None


def join_messages(messages: Sequence[Message]) -> str:
    """Joins messages for a model without a template: each text begins a new line, except for answers, which continue
    the text before them."""
    begins = ["" if message.get("role") == "assistant" or not place else "\n" for place, message in enumerate(messages)]
    return "".join(f"{begin}{message.get('content') or ''}" for begin, message in zip(begins, messages, strict=True))
