"""Between the ranks of one target: rank 0, which speaks with the orchestrator, tells the others what it feeds.

They all run the same model, a part of each layer, so each forward is all ranks'. No other process has a use for these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outrider.protocol.schema import Count, Name, OneOf, Size, Text, Token

TextDeed = Annotated[str, OneOf(("open", "close", "mark", "roll back", "set", "save", "adopt", "drop"))]


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank -> rank 0, before it loads anything.

    `runs`: the releases of what computes. `weights`: a digest of the model's files. `host` tells machines apart.
    """

    rank: Count
    size: Count
    host: Name
    runs: Text
    weights: Name


@dataclass(frozen=True, slots=True)
class TextChange:
    """Rank 0 -> a rank: what it did with a text it calls `text`.

    `length`: where it rolled back to, what it set the length to, or how much it saved or adopted. `copy`: what it calls
    the copy that it saved, adopted or dropped.
    """

    deed: TextDeed
    text: Count = 0
    length: Count = 0
    copy: Count = 0


@dataclass(frozen=True, slots=True)
class TextFeed:
    """The next tokens of a text, the last `wanted` of which get logits; without `tokens` the collective brings `count`.

    `prompt`: a piece of one.
    """

    text: Count
    tokens: Annotated[tuple[Token, ...], Size(2**16)]
    count: Count
    wanted: Count
    prompt: bool


@dataclass(frozen=True, slots=True)
class TextForward:
    """Rank 0 -> a rank: the forward that all make now."""

    feeds: tuple[TextFeed, ...]
