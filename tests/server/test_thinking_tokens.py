"""Thinking tokens are counted, however tags and words are tokenized."""

from __future__ import annotations

import pytest

from outrider.protocol.sampling import SamplingParams
from outrider.server.answers.choices import ChoiceState, Splitter
from outrider.server.answers.formatter import count_thinking_tokens
from outrider.server.model.served import ThinkingMode, TokenizedPrompt
from outrider.server.model.tool_format import SpanTags, find_thinking_tags

TAGS = SpanTags("<think>", "</think>")
HARMONY = find_thinking_tags(("<|start|>", "<|channel|>", "<|message|>", "<|call|>"))
NOTE, ANALYSIS = "<|channel|>commentary<|message|>", "<|channel|>analysis<|message|>"
END, FINAL = "<|end|><|start|>assistant", "<|channel|>final<|message|>"


class FakeCodec:
    """A codec whose token i stands for `pieces[i]`."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def of(self, token: int) -> bytes:
        return self.pieces[token].encode()


def count(pieces: tuple[str, ...], tags: SpanTags | None, begun: bool = False) -> int:
    """Counts the thinking tokens of an answer of these tokens."""
    splitter = Splitter(tags, thinking_mode=ThinkingMode.BEGUN if begun else ThinkingMode.OPTIONAL)
    for piece in pieces:
        splitter.feed(piece)
    choice = ChoiceState(0, TokenizedPrompt(()), SamplingParams(), splitter, tokens=list(range(len(pieces))))
    return count_thinking_tokens(FakeCodec(*pieces), choice)  # type: ignore[arg-type]


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
    assert count(pieces, TAGS, begun) == expected


def test_thinking_without_an_end_tag_extends_to_the_end_of_the_text() -> None:
    assert count(("<think>", "b", "c"), SpanTags("<think>", "")) == 3


def test_thinking_after_a_note_is_counted() -> None:
    """gpt-oss may tell the user something between its thoughts."""
    assert count((NOTE, "So.", END, ANALYSIS, "Hm", END, FINAL, "Four"), HARMONY) == 3
    assert count((ANALYSIS, "Hm", END, NOTE, "So.", END, ANALYSIS, "Hm", "m", END, FINAL, "Four"), HARMONY) == 7
