"""Does a tree of drafts that a target verifies get the logits of each of its branches? Once, at load.

Forked at the text and further down, alone, then in company behind a branch that was not the first. Catches models whose
attention ignores the mask or the positions that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from outrider.engine.loading import LoadedModel
from outrider.engine.ort.flat import OrtFlat
from outrider.engine.selfcheck import Own
from outrider.engine.texts import Feed, FlatTexts
from outrider.protocol.trees import lines

_PARENTS = (-1, 0, -1, 0, 2)  # two branches behind the text, the first one forked
_PATH = (0, 3)
_LENGTHS = (9, 4)


def agrees(model: LoadedModel, own: Own, cpu: OrtFlat | None = None) -> bool:
    """True if every node's logits are the model's own behind its branch, before and after one was followed."""
    texts = FlatTexts(model.model, cpu=cpu)
    tried = [_Tried.of(model, texts, number) for number in range(len(_LENGTHS))]
    first = tried[0]
    found = _agree(own, texts, [first])
    first.place.keep(len(first.text), [len(first.text) + node for node in _PATH])
    first.text += [first.nodes[node] for node in _PATH]
    found = found and _agree(own, texts, tried)
    for one in tried:
        texts.close(one.place)
    return found


@dataclass(slots=True)
class _Tried:
    """A text that was fed all of `text`, and the tokens of a tree behind it."""

    place: Any
    text: list[int]
    nodes: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, model: LoadedModel, texts: FlatTexts, number: int) -> _Tried:
        def made_up(count: int, step: int) -> list[int]:
            return [(step * i + 104729 * number + 13) % model.vocab_size for i in range(count)]

        tried = cls(texts.open(), made_up(_LENGTHS[number], 7919), tuple(made_up(len(_PARENTS), 6007)))
        texts.forward([Feed(tried.place, tried.text, 0, True)])
        mx.eval(texts.state())
        return tried


def _agree(own: Own, texts: FlatTexts, tried: list[_Tried]) -> bool:
    """Feeds each its tree; whether all logits are the model's own. Its columns stay, for a path to be followed."""
    count = len(_PARENTS)
    logits = texts.forward([Feed(one.place, one.nodes, count, parents=_PARENTS) for one in tried])
    branches = [[*one.text, *down] for one in tried for down in lines(one.nodes, _PARENTS)]
    return all(own.distance(branch, logits[row]) <= 1.0 for row, branch in enumerate(branches))
