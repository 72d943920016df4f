"""The coupled walk along a block: each slot's token by the target's own contract, by the token before it where linked.

Of a linked slot's tokens a few are looked at: those that are best with the noise already in, for noise promotes tokens
that are unlikely by themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from outrider.drafting.heads.line import Line, Pick, take
from outrider.drafting.heads.links import FEW, Link
from outrider.engine.steps import Step, score

Ints = np.ndarray[Any, np.dtype[np.int_]]


def walk(lines: Sequence[Line], logits: mx.array, hidden: mx.array, link: Link | None) -> None:
    """Chooses each line's `depth` tokens by its rows of logits [S, V] and vectors [S, H], one line's after the other's.

    Those that ask for the same are scored together. Lazy where nothing looks at tokens.
    """
    begins = np.cumsum([0, *(line.depth for line in lines)])[:-1].tolist()
    groups: dict[Hashable, list[int]] = {}
    for number, line in enumerate(lines):
        groups.setdefault(line.follower.sampler.kind, []).append(number)
    for numbers in groups.values():
        numbers.sort(key=lambda number: -lines[number].depth)
        own, places = [lines[number] for number in numbers], [begins[number] for number in numbers]
        if own[0].follower.sampler.needs_history:
            _walk_scoring(own, places, logits, hidden, link)
        else:
            _walk_scored(own, places, logits, hidden, link)


def _walk_scored(
    lines: Sequence[Line], begins: Sequence[int], logits: mx.array, hidden: mx.array, link: Link | None
) -> None:
    """The whole block is scored at once, for no choice depends on those before but by `link`."""
    rows = np.concatenate([np.arange(b, b + line.depth) for b, line in zip(begins, lines, strict=True)])
    step = score([line.asked(line.depth) for line in lines], _rows(logits, rows))
    begins = np.cumsum([0, *(line.depth for line in lines)])[:-1].tolist()
    if link is None:
        take(step, [(line, range(b, b + line.depth)) for b, line in zip(begins, lines, strict=True)])
        return
    tokens, scores = step.few(FEW)
    chain = _Linked(lines, link)
    own = _rows(hidden, rows)
    for slot in range(lines[0].depth):
        at = np.array([begin + slot for begin, line in zip(begins, lines, strict=True) if line.depth > slot])
        chain.choose(_rows(tokens, at), _rows(scores, at), _rows(own, at))


def _walk_scoring(
    lines: Sequence[Line], begins: Sequence[int], logits: mx.array, hidden: mx.array, link: Link | None
) -> None:
    """Slot by slot, for penalties and grammars look at the tokens before."""
    chain = None if link is None else _Linked(lines, link)
    for slot in range(lines[0].depth):
        able = [line for line in lines if line.depth > slot]
        at = np.array([begin + slot for begin in begins[: len(able)]])
        step: Step = score([line.asked() for line in able], _rows(logits, at))
        if chain is not None:
            chain.choose(*step.few(FEW), _rows(hidden, at))
        else:
            take(step, [(line, [row]) for row, line in enumerate(able)])


class _Linked:
    """Chains whose tokens are chosen behind one another; deepest first, so that those which go on stand in front."""

    def __init__(self, lines: Sequence[Line], link: Link) -> None:
        temp = lines[0].follower.sampler.params.temp
        self._lines, self._link, self._scale = lines, link, 1 / temp if temp else 1.0
        self._before = mx.array([line.tokens[-1] for line in lines], mx.int32)
        self._memory = link.begin(len(lines))

    def choose(self, tokens: mx.array, scores: mx.array, hidden: mx.array) -> None:
        """One more of the first R chains, of these candidates [R, C]."""
        before = self._before[: tokens.shape[0]]
        odds = self._link.odds(before, hidden)
        gains, self._memory = self._link(before, hidden, tokens, self._memory[: tokens.shape[0]])
        scores = scores + gains * self._scale
        best = mx.argmax(scores, axis=-1, keepdims=True)
        self._before = mx.take_along_axis(tokens, best, axis=-1)[:, 0]
        for row, line in enumerate(self._lines[: tokens.shape[0]]):
            line.picks.append(Pick(row, self._before, (tokens, scores) if line.width else None, odds))


def _rows(array: mx.array, rows: Ints) -> mx.array:
    return mx.take(array, mx.array(rows.astype(np.int32)), axis=0)
