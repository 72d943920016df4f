"""The prompts of every benchmark, by class: a text file each, whose entries are separated by a line with one `%`.

Two sets. The suite's are what people ask a chat model, and go through its chat template. The tiny pair's, in
`prompts/tiny/`, are texts to go on from, for it is no chat model. Both were written for this project, so that none is a
piece of what a model was trained on. Knows text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

from outrider.protocol.errors import InvalidRequest

SUITE = Path(__file__).parent / "prompts"
SUITE_CLASSES = ("chat", "code", "math", "summary", "extraction", "editing")
TINY = SUITE / "tiny"
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
    """All of the tiny pair's prompts of one class, in their order.

    Raises:
        InvalidRequest: there is no such class.
    """
    if kind not in CLASSES:
        raise InvalidRequest(f"unknown prompts {kind!r}; expected one of {', '.join(CLASSES)}")
    return _entries(kind, TINY / f"{kind}.txt")


def load_suite(folder: Path = SUITE, kinds: Sequence[str] | None = None) -> dict[str, list[Prompt]]:
    """All prompts of a suite by class: each `*.txt` of a folder is a class. `kinds`: only these.

    Raises:
        InvalidRequest: there are no such prompts.
    """
    try:
        found = {path.stem: path for path in sorted(folder.glob("*.txt"))}
        if not found:
            raise InvalidRequest(f"{folder} has no prompts; expected files like chat.txt, entries separated by % lines")
        ordered = [kind for kind in SUITE_CLASSES if kind in found] + sorted(found.keys() - set(SUITE_CLASSES))
        for kind in kinds or ():
            if kind not in found:
                raise InvalidRequest(f"unknown prompts {kind!r}; expected one of {', '.join(ordered)}")
        return {kind: _entries(kind, found[kind]) for kind in kinds or ordered}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the prompts in {folder} can't be read: {error}") from error


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


def _entries(kind: str, path: Path) -> list[Prompt]:
    entries = path.read_text(encoding="utf-8").removesuffix("\n").split("\n%\n")
    return [Prompt(kind, number, text) for number, text in enumerate(entries) if text.strip()]
