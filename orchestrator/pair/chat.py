"""A model's chat template: one user message becomes the prompt that the model was trained to answer.

Templates come with models, so they run in Jinja's sandbox. Knows text; knows nothing of tokens.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from outrider.orchestrator.pair.model_files import read_json
from outrider.protocol.errors import ModelError

JINJA_FILE = "chat_template.jinja"


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


def as_chat(template: str, prompt: str, special: dict[str, str]) -> str:
    """`prompt` as the only message of a user, ready for the assistant's answer.

    Raises:
        ModelError: the template refuses, or is broken.
    """
    from jinja2 import TemplateError  # deferred: many models have no template
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    messages = [{"role": "user", "content": prompt}]
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=messages, add_generation_prompt=True, tools=None, documents=None, **special)
    except (TemplateError, TypeError, ValueError) as error:
        raise ModelError(f"the model's chat template failed ({error}); expected one that takes a user message, or"
                         " ignore it with --ignore-chat-template") from None


def _named_default(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        found = named.get("default")
        return found if isinstance(found, str) else None
    return None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
