"""The embedded pair's tokens: its tokenizer, and the benchmarks' prompts in them."""

from __future__ import annotations

from functools import cache

from outrider.bench.prompts import mixed
from outrider.orchestrator.pairing.model_files import EMBEDDED_TARGET, find_model
from outrider.orchestrator.pairing.tokenizer import TextCodec, load_codec


@cache
def embedded_codec() -> TextCodec:
    """The tokenizer of the embedded pair."""
    return load_codec(find_model(str(EMBEDDED_TARGET)))


def mixed_tokens(count: int) -> list[tuple[int, ...]]:
    """Prompts of all classes in turn. Raises InvalidRequest like `mixed`."""
    return [embedded_codec().encode(prompt.text) for prompt in mixed(count)]


def words() -> tuple[int, ...]:
    """All prompts in one text."""
    return embedded_codec().encode("\n".join(prompt.text for prompt in mixed(None)))
