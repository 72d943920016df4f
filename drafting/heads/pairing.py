"""Is a head fed what it was trained on? Tried when it is loaded, on a text that the target writes.

Which row goes with which token, and how layers are counted, differs among formats and is wrong silently: nothing fails,
the head only agrees less. So it is fed the right way and a few wrong ones, and how often it says the target's own next
token is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from outrider.drafting.heads.head import Head
from outrider.drafting.heads.way import TriedWay
from outrider.drafting.heads.ways import way_of, wrong_ways_of
from outrider.engine.loading import LoadedModel
from outrider.engine.slots import open_slots
from outrider.engine.taps import TapPoints, Taps
from outrider.engine.verify import verify
from outrider.protocol.errors import ModelError
from outrider.protocol.sampling import SamplingParams

_LENGTH = 64
_LEAST = 0.1  # a head of this target agrees far more often, and chance is far less
_CLEARLY = 0.1


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often the head says the target's next token: as it is fed, and fed in other ways, by their names."""

    own: float
    others: dict[str, float]

    @property
    def doubt(self) -> str:
        """What looks wrong, in a sentence; empty if nothing does."""
        best = max(self.others, key=self.others.__getitem__, default="")
        if best and self.others[best] > self.own + _CLEARLY:
            return (
                f"the head agrees with the target in {self.own:.0%} of the tokens of a trial, and in"
                f" {self.others[best]:.0%} with {best}: its config.json may count layers differently;"
                " few drafts will be accepted"
            )
        if self.own < _LEAST:
            return (
                f"the head agrees with the target in {self.own:.0%} of the tokens of a trial; expected one that was"
                " trained for this target: few drafts will be accepted"
            )
        return ""


def agreement(head: Head, model: LoadedModel) -> Agreement:
    """Writes a text with the target and lets the head foretell it."""
    text = trial_text(model)
    own = _share(head, way_of(head), model, text)
    others = {f"tokens {_away(by)}": _share(head, way_of(head), model, text, tokens=by) for by in (-1, 1)}
    others |= {name: _share(head, way, model, text) for name, way in wrong_ways_of(head)}
    for name, points in _other_points(head.points):
        try:
            others[name] = _share(head, way_of(head), model, text, points)
        except ModelError:  # there is no such layer
            continue
    return Agreement(own, others)


def trial_text(model: LoadedModel) -> list[int]:
    """What the target writes by itself."""
    slot = open_slots(model, [[0]], [SamplingParams(temp=1.0, seed=1)])[0]
    return [0, *(verify(slot).bonus for _ in range(_LENGTH))]


def _other_points(points: TapPoints) -> Iterator[tuple[str, TapPoints]]:
    for by in (-1, 1) if points.layers else ():
        yield f"layers {_away(by)}", replace(points, layers=tuple(number + by for number in points.layers))
    if points.before_norm != points.after_norm:
        other = replace(points, before_norm=points.after_norm, after_norm=points.before_norm)
        yield "rows from the other side of the norm", other


def _away(by: int) -> str:
    return "one further on" if by > 0 else "one further back"


def _share(
    head: Head, way: TriedWay, model: LoadedModel, text: list[int], points: TapPoints | None = None, tokens: int = 0
) -> float:
    """How often it is right with rows from these points, and tokens so far from where they belong."""
    rows: list[mx.array] = []
    logits = Taps(model.model, points or head.points, head.fuse).forward(
        lambda: model.model(mx.array([text]))[0], [(len(text), rows.append)]
    )
    begin, end = 0, len(text) - 1 - max(tokens, 0)
    behind = slice(begin + 1 + tokens, end + 1 + tokens)
    said, truth = way.foretell(mx.array(text[behind], mx.int32), rows[0][begin:end]), mx.argmax(logits[behind], axis=-1)
    return cast(float, (said == truth).mean().item())
