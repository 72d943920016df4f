"""A model's text side without its weights: prompts and conversations as the tokens that it answers.

A message has a `role` and a `content`, as chat templates take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.orchestrator.pair.chat import Message, chat_template, render
from outrider.orchestrator.pair.model_files import ModelFiles
from outrider.orchestrator.pair.tokenizer import TextCodec, load_codec


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
