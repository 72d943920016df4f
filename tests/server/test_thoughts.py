"""Thinking tokens are counted, however tags and words are tokenized."""

from __future__ import annotations

import pytest

from outrider.server.answers.usage import count_thinking_tokens
from outrider.server.model.tool_format import SpanTags

TAGS = SpanTags("<think>", "</think>")


class Spelled:
    """Tokens that stand for these pieces of text, by index."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def of(self, token: int) -> bytes:
        return self.pieces[token].encode()


@pytest.mark.parametrize(
    ("pieces", "begun", "expected"),
    [
        (("<think>", "Hm", "m", "</think>", "Four"), False, 4),
        (("Hm", "m", "</think>", "Four"), True, 3),
        (("Hm", "m</th", "ink>Fo", "ur"), True, 3),
        (("\n", "<think>", "Hm", "</think>", "four", ""), False, 3),
        (("So ", "<think>", "Hm", "</think>", "four", ""), False, 0),
        (("<think>", "Hm", "m"), False, 3),
        (("Hm", "m"), True, 2),
        (("Four",), False, 0),
        (("Hm</think>a", "b<think>", "c", "</think>", "d"), True, 1),
        (("Hm</think>", " <think>", "c", "</think>", "d"), True, 4),
        (("Hmé", "</think>", "ü"), True, 2),
        ((), True, 0),
    ],
)
def test_thinking_tokens_are_counted_between_tags(pieces: tuple[str, ...], begun: bool, expected: int) -> None:
    assert count_thinking_tokens(Spelled(*pieces), TAGS, begun, list(range(len(pieces)))) == expected  # type: ignore[arg-type]


def test_thinking_without_an_end_tag_extends_to_the_end_of_the_text() -> None:
    spelled = Spelled("<think>", "b", "c")
    assert count_thinking_tokens(spelled, SpanTags("<think>", ""), False, [0, 1, 2]) == 3  # type: ignore[arg-type]
