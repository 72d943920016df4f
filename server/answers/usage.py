"""Tokens counted, in each API's own terms."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.server.answers.telling import Choice
from outrider.server.answers.thoughts import Count
from outrider.server.shapes.base import CachedTokens, ReasoningTokens, Usage
from outrider.server.shapes.messages import MessagesUsage
from outrider.server.shapes.responses import ResponsesUsage, WrittenTokens


def usage(prompt_tokens: int, choices: Sequence[Choice], thoughts: Count | None = None) -> Usage:
    """OpenAI's; a prompt that several choices share counts once. `thoughts` are counted where there may be any."""
    made = sum(len(choice.tokens) for choice in choices)
    held = max((choice.timings.cache_n for choice in choices), default=0)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=made,
        total_tokens=prompt_tokens + made,
        prompt_tokens_details=CachedTokens(cached_tokens=held),
        completion_tokens_details=ReasoningTokens(reasoning_tokens=sum(map(thoughts, choices))) if thoughts else None,
    )


def responses_usage(prompt_tokens: int, choice: Choice, thoughts: Count) -> ResponsesUsage:
    """That of the responses API."""
    made = len(choice.tokens)
    return ResponsesUsage(
        input_tokens=prompt_tokens,
        input_tokens_details=WrittenTokens(
            cached_tokens=choice.timings.cache_n, cache_write_tokens=choice.timings.prompt_n
        ),
        output_tokens=made,
        output_tokens_details=ReasoningTokens(reasoning_tokens=thoughts(choice)),
        total_tokens=prompt_tokens + made,
    )


def messages_usage(prompt_tokens: int, choice: Choice | None) -> MessagesUsage:
    """Anthropic's; None: nothing has been made yet."""
    held = choice.timings.cache_n if choice is not None else 0
    return MessagesUsage(
        input_tokens=prompt_tokens - held,
        output_tokens=len(choice.tokens) if choice is not None else 0,
        cache_read_input_tokens=held,
    )
