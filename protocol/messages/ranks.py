"""Messages between the ranks of one target. Rank 0, which talks to the orchestrator, tells the others what it feeds.

All ranks run the same model, each with a part of every layer, so every forward involves all ranks. No other process
uses these messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from outrider.protocol.schema import Count, Name, OneOf, Size, Text, Token

TextDeed = Annotated[str, OneOf(("open", "close", "mark", "roll back", "set", "save", "adopt", "drop"))]


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank -> rank 0, before it loads anything.

    `runs` names the releases of the computing libraries, `weights` is a digest of the model's files, and `host`
    identifies the machine.
    """

    rank: Count
    size: Count
    host: Name
    runs: Text
    weights: Name


@dataclass(frozen=True, slots=True)
class TextChange:
    """Rank 0 -> a rank: a change to the text with the number `text`.

    `length` is the length it was rolled back or set to, or the length that was saved or adopted. `copy` is the number
    of the copy that was saved, adopted or dropped.
    """

    deed: TextDeed
    text: Count = 0
    length: Count = 0
    copy: Count = 0


@dataclass(frozen=True, slots=True)
class TextFeed:
    """The next tokens of a text; the last `wanted` of them get logits. Without `tokens` the collective delivers
    `count`.

    `prompt`: the tokens are a piece of a prompt.
    """

    text: Count
    tokens: Annotated[tuple[Token, ...], Size(2**16)]
    count: Count
    wanted: Count
    prompt: bool


@dataclass(frozen=True, slots=True)
class TextForward:
    """Rank 0 -> a rank: the forward that all ranks run now."""

    feeds: tuple[TextFeed, ...]
