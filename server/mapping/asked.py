"""What OpenAI's two older APIs ask for beside the text: how many choices, and whether a stream tells its usage."""

from __future__ import annotations

from outrider.server.problems import Refused
from outrider.server.shapes.base import Sampling


def choices(asked: Sampling) -> int:
    return asked.n if asked.n is not None else 1


def usage_wanted(asked: Sampling) -> bool:
    """Raises Refused for stream_options without a stream."""
    if asked.stream_options is None:
        return False
    if not asked.stream:
        raise Refused("stream_options needs stream: true", "stream_options")
    return bool(asked.stream_options.include_usage)
