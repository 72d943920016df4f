"""The tokens of the model under test, which is the embedded one unless $OUTRIDER_MODEL names another."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from outrider.bench.prompts import mixed
from outrider.orchestrator.pairing.model_files import default_model, find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec


@cache
def default_codec() -> TextCodec:
    """Returns the tokenizer of the model under test."""
    return load_codec(find_model(default_model()[0]))


def model_folder() -> Path:
    """Returns the folder of its checkpoint."""
    return find_model(default_model()[0]).folder


def mixed_tokens(count: int) -> list[tuple[int, ...]]:
    """Prompts of all classes in turn. Raises InvalidRequest like `mixed`."""
    return [default_codec().encode(prompt.text) for prompt in mixed(count)]


def words() -> tuple[int, ...]:
    """All prompts in one text."""
    return default_codec().encode("\n".join(prompt.text for prompt in mixed(None)))
