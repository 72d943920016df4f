"""The target's two ways to go on: `verify` a proposed chain in one forward, or run ahead by itself, one step pipelined.

Both choose tokens by the same scores, so a coupled text doesn't depend on which way each of its tokens came. A chain
that comes with a q is ruled on by `engine.residual`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from outrider.engine.residual import Floats, ResidualSampler
from outrider.engine.sampling import Sampler
from outrider.engine.slots import Slot
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.guard import ModelFault
from outrider.protocol.sparse import SparseQ

_MAX_REPLAY = 8  # committed tokens a model with recurrent state may feed again before its next chain


@dataclass(frozen=True, slots=True)
class Verdict:
    """The first `accepted` tokens of a chain hold; `bonus` is the target's own token after them."""

    accepted: int
    bonus: int


def verify(slot: Slot, chain: Sequence[int] = (), q: SparseQ | None = None) -> Verdict:
    """One forward over the last committed token and the chain; accepts while the target's token is the chain's.

    The slot commits the accepted tokens and the bonus, and forgets the rest. An empty chain is a decoding step.

    Args:
        q: where the slot samples residual, what the chain's tokens were drawn from.

    Raises:
        ModelFault: the model's logits are not numbers.
        InvalidRequest: the chain's kind is not what the slot samples by.
    """
    chain = list(chain)
    if len(slot.unfed) > _MAX_REPLAY:
        slot.feed_all_but(1)
    if chain:
        slot.kv.mark()
    # A drafter may know tokens that the target does not; such a one can't hold, and nor can what stands after it.
    known = [token if token < slot.sampler.vocab_size else 0 for token in chain]
    logits = slot.forward(mx.array(slot.unfed + known))[-len(chain) - 1 :]
    base = len(slot.tokens)
    histories = _histories(slot, chain) if slot.sampler.needs_history else None
    positions = range(base, base + len(chain) + 1)
    if chain and isinstance(slot.sampler, ResidualSampler):
        verdict = _by_residual(slot.sampler, slot.sampler.log_p(logits, histories), positions, chain, q)
    else:
        verdict = _by_equality(slot.sampler, slot.sampler.scores(logits, positions, histories), chain, q)
    slot.tokens += [*chain[: verdict.accepted], verdict.bonus]
    slot.kv.roll_back(len(slot.tokens) - 1)
    return verdict


def _histories(slot: Slot, chain: Sequence[int]) -> list[list[int]]:
    """What penalties see before each choice: no more of the text than they reach."""
    reach = slot.sampler.reach
    line = [*slot.tokens[-reach:], *chain]
    ends = range(len(line) - len(chain), len(line) + 1)
    return [line[max(end - reach, 0) : end] for end in ends]


def _by_equality(sampler: Sampler, scores: mx.array, chain: Sequence[int], q: SparseQ | None) -> Verdict:
    if q is not None and chain and sampler.params.temp > 0:
        raise InvalidRequest("the chain comes with a q and the request samples coupled; expected one without")
    choices = _tokens(_choices(scores))
    accepted = 0
    while accepted < len(chain) and choices[accepted] == chain[accepted]:
        accepted += 1
    return Verdict(accepted, choices[accepted])


def _by_residual(
    sampler: ResidualSampler, log_p: Floats, positions: Sequence[int], chain: Sequence[int], q: SparseQ | None
) -> Verdict:
    if q is None:
        raise InvalidRequest("the chain comes without a q and the request samples residual; expected one with")
    if not (log_p.max(axis=-1) > -np.inf).all():
        raise ModelFault("the target's logits are not numbers; this request can't go on")
    k = sampler.accepted(log_p[:-1], positions[:-1], chain, q)
    rejected = q.part(k, k + 1) if k < len(chain) else None
    return Verdict(k, sampler.instead(log_p[k], positions[k], rejected))


class RunAhead:
    """Plain decoding with one step in flight: step t+1 is queued before token t is read, as `mlx_lm.generate` does.

    While it runs nobody else may use the slot; `stop` leaves the slot as if its tokens had been decoded one by one.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._position = len(slot.tokens)  # of the token the next step chooses
        self._pipelined = slot.kv.marks_freely
        self._queued: mx.array | None = None

    @property
    def is_computing(self) -> bool:
        """Whether the next token's step has been under way since the last one was read."""
        return self._queued is not None

    def next(self, last: bool = False) -> int:
        """The next token, now committed. After the `last` one no step is queued: nobody would read it."""
        slot = self._slot
        chosen = self._queued
        if chosen is None:
            chosen = self._step(mx.array(slot.unfed))
            mx.async_eval(chosen)  # type: ignore[no-untyped-call]
        self._queued = self._step(chosen) if self._pipelined and not last else None
        if self._queued is not None:
            mx.async_eval(self._queued)  # type: ignore[no-untyped-call]
        token = _tokens(chosen)[0]
        slot.tokens.append(token)
        if len(slot.tokens) % 256 == 0:
            mx.clear_cache()
        return token

    def stop(self) -> None:
        """Takes back the step in flight."""
        if self._queued is not None:
            self._slot.kv.roll_back(len(self._slot.tokens) - 1)
            self._queued = None

    def _step(self, fed: mx.array) -> mx.array:
        """Queues one step over `fed` (its last entry may be unread): the token it chooses, [1], lazy."""
        slot = self._slot
        if self._pipelined:
            slot.kv.mark()
        logits = slot.forward(fed)[-1:]
        histories = None
        if slot.sampler.needs_history:
            read = mx.array(slot.tokens[-slot.sampler.reach :])
            histories = [read if self._position == len(slot.tokens) else mx.concatenate([read, fed])]
        scores = slot.sampler.scores(logits, [self._position], histories)
        self._position += 1
        return _choices(scores)


def _choices(scores: mx.array) -> mx.array:
    """The best token of each row, [N]; -1 where the best is no number."""
    best = mx.argmax(scores, axis=-1)
    score = mx.take_along_axis(scores, best[:, None], axis=-1)[:, 0]
    return mx.where(score > -mx.inf, best.astype(mx.int32), -1)


def _tokens(choices: mx.array) -> list[int]:
    """Waits for `choices` [N]. Raises ModelFault where there was none."""
    tokens = cast(list[int], choices.tolist())
    if min(tokens) < 0:
        raise ModelFault("the target's logits are not numbers; this request can't go on")
    return tokens
