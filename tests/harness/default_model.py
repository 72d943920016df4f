"""The prompts and the tokenizer of the model under test: the tiny one, unless $OUTRIDER_MODEL names another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, zip_longest
from pathlib import Path

from outrider.bench.commands.files import TINY_FOLDER, load_prompts
from outrider.orchestrator.pairing.model_files import default_model, find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec
from outrider.protocol.errors import InvalidRequest

TINY_CLASSES = ("code", "repeated", "prose", "json")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a class (`kind`); `number` counts from 0 within the class."""

    kind: str
    number: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


def default_codec() -> TextCodec:
    """Returns the tokenizer of the model under test."""
    return _codec(default_model()[0])


@cache
def _codec(model: str) -> TextCodec:
    return load_codec(find_model(model))


def model_folder() -> Path:
    """Returns the folder of its checkpoint."""
    return find_model(default_model()[0]).folder


def mixed_prompts(count: int | None, kinds: Sequence[str] = TINY_CLASSES) -> list[Prompt]:
    """Returns `count` prompts (None: all), taking the classes in turn.

    Raises:
        InvalidRequest: there are fewer, `count` is not positive, or a class is unknown.
    """
    texts = load_prompts(TINY_FOLDER, kinds)
    turns = zip_longest(*([Prompt(kind, n, text) for n, text in enumerate(texts[kind])] for kind in kinds))
    prompts = [prompt for prompt in chain.from_iterable(turns) if prompt is not None]
    if count is not None and not 1 <= count <= len(prompts):
        raise InvalidRequest(f"{count} prompts were requested; expected 1 to {len(prompts)}")
    return prompts[:count]


def mixed_tokens(count: int) -> list[tuple[int, ...]]:
    """Returns the tokens of `count` prompts. Raises InvalidRequest like `mixed_prompts`."""
    return [default_codec().encode(prompt.text) for prompt in mixed_prompts(count)]


def all_prompt_tokens() -> tuple[int, ...]:
    """Returns the tokens of all prompts, joined to one text."""
    return default_codec().encode("\n".join(prompt.text for prompt in mixed_prompts(None)))
