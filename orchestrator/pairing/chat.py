"""A model's text side without its weights: its chat template, and prompts as the tokens that it answers.

`chat_template`: a model's chat template: a conversation becomes the prompt that the model was trained to answer.
Templates come with models, so they run in Jinja's sandbox. Knows text; knows nothing of tokens.

A message has a `role` and a `content`, as chat templates take it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from outrider.orchestrator.pairing.model_files import ModelFiles, read_json
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec
from outrider.protocol.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from jinja2 import Template


JINJA_FILE = "chat_template.jinja"
Message: TypeAlias = Mapping[str, Any]
"""As templates take it: `role` and `content`, and where there are some `tool_calls`, `tool_call_id`, `name`, ..."""
OWN = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""What a template is given by us, so that no keyword of a caller's may take its name."""


def chat_template(folder: Path) -> str | None:
    """The template in a model's folder; None when it has none."""
    try:
        return (folder / JINJA_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    for file in ("chat_template.json", "tokenizer_config.json"):
        found = _named_default(read_json(folder / file).get("chat_template"))
        if found is not None:
            return found
    return None


def render(
    template: str,
    messages: Sequence[Message],
    special: Mapping[str, str],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    answer: bool = True,
    keywords: Mapping[str, Any] | None = None,
) -> str:
    """`messages` as the model reads them; `answer` ends with what begins the assistant's turn (add_generation_prompt).

    `tools` are functions in OpenAI's shape, `keywords` what else this template knows, such as enable_thinking.

    Raises:
        InvalidRequest: a keyword has the name of something that the template is given anyway.
        ModelError: the template refuses, or is broken.
    """
    from jinja2 import TemplateError  # deferred: many models have no template

    given = {**special, **(keywords or {})}
    taken = OWN.intersection(given)
    if taken:
        raise InvalidRequest(f"the chat template keyword {min(taken)} is reserved; rename it")
    try:
        return _compiled(template).render(
            messages=messages, add_generation_prompt=answer, tools=tools, documents=None, **given
        )
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        raise ModelError(
            f"the model's chat template failed ({error}); expected one that takes these messages, or"
            " none (--ignore-chat-template)"
        ) from None


def without_end(rendered: str, last: str) -> str:
    """A rendered conversation up to the end of its `last` message's text, so that the model goes on with it.

    Raises:
        InvalidRequest: the template has changed that text, so that its end can't be found.
    """
    text = last.strip()
    place = rendered.rfind(text)
    if not text or place < 0:
        raise InvalidRequest("the final message can't be continued: its text is empty, or the chat template changes it")
    kept = last.lstrip()  # with the spaces at its end, if the template left them
    return rendered[: place + len(kept if rendered.startswith(kept, place) else text)]


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def _named_default(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        found = named.get("default")
        return found if isinstance(found, str) else None
    return None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


@dataclass(frozen=True, slots=True)
class ModelText:
    """`template`: the model's own for conversations; None when it has none, or it is not to be used."""

    codec: TextCodec
    template: str | None

    def tokens(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The tokens that stand for a user's text, or for a conversation that is to be answered.

        Without a template a text is taken as it is; messages become one text that the model goes on with.

        Raises:
            ModelError: the template refuses the messages.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.template is None:
            return self.codec.encode(as_text(messages))
        return self.codec.encode(render(self.template, messages, self.codec.special), special=False)


def as_text(messages: Sequence[Message]) -> str:
    """What is said to a model without a template: the texts alone, each on a line of its own but for the answers, which
    went on with what was said."""
    begins = ["" if message.get("role") == "assistant" or not place else "\n" for place, message in enumerate(messages)]
    return "".join(f"{begin}{message.get('content') or ''}" for begin, message in zip(begins, messages, strict=True))


def load_text(model: ModelFiles, template: bool = True) -> ModelText:
    """The text side of a model; `template` False: without its chat template.

    Raises:
        ModelError: its files can't be read.
    """
    return ModelText(load_codec(model), chat_template(model.folder) if template else None)
