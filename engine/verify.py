"""The target's two ways to go on: `verify` a proposed chain in one forward, or run ahead by itself, one step pipelined.

Both choose tokens by the same scores, so a text doesn't depend on which way each of its tokens came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx

from engine.loading import LoadedModel
from engine.slots import Slot

_MAX_REPLAY = 8  # committed tokens a model with recurrent state may feed again before its next chain


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` tokens of a chain hold; `bonus` is the target's own token after them."""

    accepted: int
    bonus: int


def verify(model: LoadedModel, slots: Sequence[Slot], chains: Sequence[Sequence[int]]) -> list[Verdict]:
    """One forward a slot over its last committed token and its chain; accepts while the target's token is the chain's.

    Each slot commits its accepted tokens and the bonus, and forgets the rest. An empty chain is a decoding step.

    Raises:
        RollbackError: the model keeps state that can't be rolled back, and the chain was not accepted whole.
    """
    return [_verify(slot, list(chain)) for slot, chain in zip(slots, chains, strict=True)]


def _verify(slot: Slot, chain: list[int]) -> Verdict:
    if len(slot.unfed) > _MAX_REPLAY:
        slot.feed_all_but(1)
    slot.history.mark()
    logits = slot.forward(mx.array(slot.unfed + chain))[-len(chain) - 1 :]
    base = len(slot.tokens)
    histories = [slot.tokens + chain[:i] for i in range(len(chain) + 1)] if slot.sampler.needs_history else None
    scores = slot.sampler.scores(logits, range(base, base + len(chain) + 1), histories)
    choices = _ints(mx.argmax(scores, axis=-1))
    accepted = 0
    while accepted < len(chain) and choices[accepted] == chain[accepted]:
        accepted += 1
    slot.tokens += [*chain[:accepted], choices[accepted]]
    slot.history.roll_back(len(slot.tokens) - 1)
    return Verdict(accepted, choices[accepted])


class RunAhead:
    """Plain decoding with one step in flight: step t+1 is queued before token t is read, as `mlx_lm.generate` does.

    While it runs nobody else may use the slot; `stop` leaves the slot as if its tokens had been decoded one by one.
    """

    def __init__(self, model: LoadedModel, slot: Slot) -> None:
        self._slot = slot
        self._position = len(slot.tokens)  # of the token the next step chooses
        self._pipelined = slot.history.can_roll_back
        self._queued: mx.array | None = None

    def next(self) -> int:
        """The next token, now committed."""
        slot = self._slot
        chosen = self._queued
        if chosen is None:
            chosen = self._step(mx.array(slot.unfed))
            mx.async_eval(chosen)  # type: ignore[no-untyped-call]
        if self._pipelined:
            self._queued = self._step(chosen)
            mx.async_eval(self._queued)  # type: ignore[no-untyped-call]
        token = _ints(chosen)[0]
        slot.tokens.append(token)
        if len(slot.tokens) % 256 == 0:
            mx.clear_cache()
        return token

    def stop(self) -> None:
        """Takes back the step in flight."""
        if self._queued is not None:
            self._slot.history.roll_back(len(self._slot.tokens) - 1)
            self._queued = None

    def _step(self, fed: mx.array) -> mx.array:
        """Queues one step over `fed` (its last entry may be unread): the token it chooses, [1], lazy."""
        slot = self._slot
        slot.history.mark()
        logits = slot.forward(fed)[-1:]
        histories = None
        if slot.sampler.needs_history:
            read = mx.array(slot.tokens[-slot.sampler.reach :])
            histories = [read if self._position == len(slot.tokens) else mx.concatenate([read, fed])]
        scores = slot.sampler.scores(logits, [self._position], histories)
        self._position += 1
        return mx.argmax(scores, axis=-1)


def _ints(array: mx.array) -> list[int]:
    """Waits for `array` [N]."""
    return cast(list[int], array.tolist())
