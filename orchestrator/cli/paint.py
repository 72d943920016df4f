"""Text coloured by where its tokens came from, for a terminal."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from outrider.orchestrator.client.result import Chunk
from outrider.orchestrator.front.text import TextStream
from outrider.protocol.origins import Origin

COLOURS = {
    Origin.PREPARED: "\x1b[32m",
    Origin.DRAFTED: "\x1b[36m",
    Origin.HEAD: "\x1b[35m",
    Origin.COPIED: "\x1b[33m",
    Origin.GUESSED: "\x1b[34m",
    Origin.TARGET: "",
}
WORDS = {
    Origin.PREPARED: "prepared branch",
    Origin.DRAFTED: "just in time",
    Origin.HEAD: "by a head",
    Origin.COPIED: "copied from the text",
    Origin.GUESSED: "beside a chain",
    Origin.TARGET: "the target's own",
}
PLAIN = "\x1b[0m"


class Painter:
    """One answer's chunks, coloured. A character of several tokens has the colour of its last."""

    def __init__(self, text: TextStream) -> None:
        self._text = text
        self.counts: Counter[Origin] = Counter()

    def of(self, chunk: Chunk) -> str:
        """The chunk's text, in colours if it tells where its tokens came from."""
        if not chunk.origins:
            return chunk.text
        self.counts.update(chunk.origins)
        pieces = [
            (origin, self._text.feed((token,)).text)
            for token, origin in zip(chunk.token_ids, chunk.origins, strict=True)
        ]
        runs = groupby(pieces, key=lambda piece: piece[0])
        return "".join(painted("".join(text for _, text in run), origin) for origin, run in runs)


def painted(text: str, origin: Origin) -> str:
    """`text` in the colour of `origin`, in which nothing after it is written."""
    colour = COLOURS[origin]
    return f"{colour}{text}{PLAIN}" if colour and text else text


def legend() -> str:
    return ", ".join(painted(words, origin) for origin, words in WORDS.items())


def counted(counts: Counter[Origin]) -> str:
    """How many tokens came from where."""
    return ", ".join(painted(f"{counts[origin]} {words}", origin) for origin, words in WORDS.items())
