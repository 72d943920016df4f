"""How many of an answer's tokens were thoughts, their marks among them: by the bytes that each token stands for."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate

from outrider.orchestrator.pair.spelling import Spelling
from outrider.server.answers.telling import Choice
from outrider.server.model.served import Prompt, ServedModel, Thoughts
from outrider.server.model.thinking import Tags

Count = Callable[[Choice], int]


def counter(model: ServedModel, prompt: Prompt) -> Count:
    """For answers to `prompt`, which may have begun a thought."""
    begun = prompt.thoughts is Thoughts.BEGUN

    def count(choice: Choice) -> int:
        if model.thinking is None or not choice.thought:
            return 0
        return thought_tokens(model.codec.spelling, model.thinking, begun, choice.tokens)

    return count


def thought_tokens(spelling: Spelling, tags: Tags, begun: bool, tokens: list[int]) -> int:
    """Those from a thought's first mark to its last; a text cut off within it has nothing else."""
    pieces = [spelling.of(token) for token in tokens]
    text, ends = b"".join(pieces), list(accumulate(map(len, pieces)))
    first, last = tags.start.encode(), tags.end.encode()
    start = 0 if begun else text.find(first)
    count = 0
    while start >= 0:
        found = text.find(last, start) if last else -1
        end = found + len(last) if found >= 0 else len(text)
        count += min(bisect_left(ends, end) + 1, len(ends)) - bisect_right(ends, start)
        start = text.find(first, end)
    return count
