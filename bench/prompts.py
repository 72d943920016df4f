"""The prompts every benchmark uses, by class. Plain text files in `prompts/`, entries separated by a line with one `%`.

Knows text only; written for this project, so that no prompt is a piece of what the embedded pair was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from outrider.protocol.errors import InvalidRequest

FOLDER = Path(__file__).parent / "prompts"
CLASSES = ("code", "repeated", "prose", "json")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`number` counts from 0 within its class."""

    kind: str
    number: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


def load(kind: str) -> list[Prompt]:
    """All prompts of one class, in their order.

    Raises:
        InvalidRequest: there is no such class.
    """
    if kind not in CLASSES:
        raise InvalidRequest(f"no prompts are called {kind!r}; expected one of {', '.join(CLASSES)}")
    entries = (FOLDER / f"{kind}.txt").read_text(encoding="utf-8").removesuffix("\n").split("\n%\n")
    return [Prompt(kind, number, text) for number, text in enumerate(entries)]


def mixed(count: int | None, kinds: Sequence[str] = CLASSES) -> list[Prompt]:
    """`count` prompts (None: all), the classes in turn, so that any count is a fair mixture; what is left is code.

    Raises:
        InvalidRequest: there are not that many, or none are wanted, or no such class.
    """
    turns = zip_longest(*(load(kind) for kind in kinds))
    prompts = [prompt for prompt in chain.from_iterable(turns) if prompt is not None]
    if count is not None and not 1 <= count <= len(prompts):
        raise InvalidRequest(f"{count} prompts were asked for; expected 1 to {len(prompts)}")
    return prompts[:count]
