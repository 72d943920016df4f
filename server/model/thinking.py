"""How a model marks its thoughts. The marks are found as mlx-lm finds them: by the tokens that the vocabulary has."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

_PAIRS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
)
_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


@dataclass(frozen=True, slots=True)
class Tags:
    """What begins and what ends a stretch of text; an empty `end`: the text's own end."""

    start: str
    end: str


def thinking_tags(vocabulary: Collection[str]) -> Tags | None:
    """None when nothing says that the model thinks aloud."""
    for start, end in _PAIRS:
        if start in vocabulary and end in vocabulary:
            return Tags(start, end)
    if "<|channel>" in vocabulary and "<channel|>" in vocabulary:
        return Tags("<|channel>thought", "<channel|>")
    if is_xtml(vocabulary):
        return Tags("<|open|>think<|sep|>", "<|close|>think<|sep|>")
    return None


def is_xtml(vocabulary: Collection[str]) -> bool:
    """Whether this is a vocabulary of Kimi's third format."""
    return all(token in vocabulary for token in _XTML)
