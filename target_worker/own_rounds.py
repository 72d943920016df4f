"""Rounds that the target makes by itself once it was told how many: plain decoding, or chains of its own drafter.

Knows a request's slot and what it was asked for; receives and sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from outrider.engine.pace import Pace, paced
from outrider.engine.verify import RunAhead
from outrider.protocol import clock
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Outcome, Span, Verify
from outrider.target_worker.colocated import Colocated, DraftedRounds, Drafting
from outrider.target_worker.running import Running

Progress = Callable[[int, int], None]


class OwnRounds:
    """What such rounds of all requests share: the model's pace, and the drafter beside it, if there is one."""

    def __init__(self, pace: Pace | None, colocated: Colocated | None) -> None:
        self._pace = pace
        self._colocated = colocated

    def start(self, running: Running, message: Verify, progress: Progress) -> None:
        """The request's next round, of an empty chain or of one drafted here, may be followed by `run_ahead` more.

        Args:
            progress: told of how the drafter reads the text; may raise to end that.

        Raises:
            InvalidRequest: the target is to draft and has no drafter.
        """
        drafting = self._drafting(running, progress) if message.draft else None
        running.answers.append(replace(running.last, round=message.round - 1))
        if drafting is not None:
            room = max(message.room, 1)
            running.ahead = DraftedRounds(running.slot, drafting, message.draft, room, running.eos)
        else:
            running.ahead = RunAhead(running.slot)
        running.ahead_left = message.run_ahead + 1

    def next(self, running: Running, ready: float) -> Outcome | None:
        """The next round's outcome, None when no round is left. `ready`: when its work was there, seconds."""
        match running.ahead:
            case RunAhead() as ahead:
                outcome = self._plain_round(running, ahead, ready)
                over = False
            case DraftedRounds() as rounds:
                outcome = _drafted_round(running, rounds)
                over = rounds.over
            case _:
                return None
        running.ahead_left -= 1
        if over or running.ahead_left == 0:
            running.stop_ahead()
        return outcome

    def _drafting(self, running: Running, progress: Progress) -> Drafting:
        """The own drafter's part of a request. It reads the text when it is first asked for: plain decoding pays
        nothing.
        """
        if self._colocated is None:
            raise InvalidRequest("this target has no drafter of its own; expected a draft of 0, or --draft-model")
        if running.drafting is None:
            slot = running.slot
            running.drafting = self._colocated.open(slot.tokens, slot.sampler.params, progress)
        return running.drafting

    def _plain_round(self, running: Running, ahead: RunAhead, ready: float) -> Outcome:
        last, base_len = running.last, len(running.slot.tokens)
        started_ns = last.work.ended_ns if ahead.is_computing else clock.now()
        with paced(self._pace, 1, ready):
            token = ahead.next(last=running.ahead_left == 1)
        work, idle_ns = Span(started_ns, clock.now()), max(started_ns - last.work.ended_ns, 0)
        peak = mx.get_peak_memory()
        return Outcome(last.request, last.epoch, last.round + 1, base_len, 0, token, work, idle_ns, peak_bytes=peak)


def _drafted_round(running: Running, rounds: DraftedRounds) -> Outcome:
    last, base_len = running.last, len(running.slot.tokens)
    made = rounds.next()
    return Outcome(
        last.request,
        last.epoch,
        last.round + 1,
        base_len,
        made.verdict.accepted,
        made.verdict.bonus,
        made.work,
        max(made.work.started_ns - last.work.ended_ns, 0),
        peak_bytes=mx.get_peak_memory(),
        drafted=made.chain,
        drafting=made.drafting,
    )
