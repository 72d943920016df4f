"""Chains by a head, for several requests in forwards that they share.

A text's new pairs are read, all true: each verify tells the features of what it accepted, and nothing that was drafted
is kept. How chains come of them is the head's `Way`. Tokens are chosen by the target's own contract
(`engine.sampling`): the same noise, by the target's names of tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import mlx.core as mx

from outrider.drafting.calibration import Calibration
from outrider.drafting.continuation import Continuation
from outrider.drafting.heads.follower import Follower
from outrider.drafting.heads.head import Head
from outrider.drafting.heads.line import Line
from outrider.drafting.heads.pairs import Reader
from outrider.drafting.heads.way import Way
from outrider.drafting.heads.ways import way_of
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.sampling import Sampler
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import OutriderError
from outrider.protocol.guard import ModelFault, named_errors
from outrider.protocol.kv import KvCost
from outrider.protocol.sampling import SamplingParams

log = logging.getLogger(__name__)

_NO_NUMBERS = "the head's vectors are not numbers: its weights or the target's rows are beyond its number format"


class HeadDrafter:
    """Drafts with `head` in the target's process. `note`: what a person should know about it. `agreement`: how often it
    said the target's next token in a trial, if there was one."""

    def __init__(
        self, head: Head, vocab_size: int, note: str = "", way: Way | None = None, agreement: float | None = None
    ) -> None:
        """`vocab_size`: the target's. `way`: None: its kind's."""
        self.head, self.note, self.agreement = head, note, agreement
        self.vocab_size, self.weight_bytes = vocab_size, head.weight_bytes
        self.prompt_cache = PromptCache(KvCost(0, head.bytes_per_pair))
        self._way = way or way_of(head)
        self.calibration = Calibration()

    @property
    def texts(self) -> Reader:
        """What the head remembers."""
        return self._way.texts

    def follow(self, sampling: SamplingParams, constraint: Constraint | None = None) -> Follower:
        """What is to hear the features of a text that chains are wanted for."""
        return Follower(self.texts, self.sampler(sampling, constraint), self.head.reach, self.prompt_cache)

    def keep(self, follower: Follower, tokens: Sequence[int]) -> None:
        """What was read of these committed tokens stays for later texts."""
        if not self.prompt_cache.wants(tokens):
            return
        try:
            with named_errors("storing the head's state"):
                length = follower.read_all(tokens)
                if length:
                    self.prompt_cache.keep(tokens[:length], follower.save(length))
        except OutriderError as error:
            log.warning("%s; the head will read it again", error)

    def sampler(self, sampling: SamplingParams, constraint: Constraint | None = None) -> Sampler:
        return Sampler(sampling, self.vocab_size, normalised=False, constraint=constraint)

    def continuations(self, lines: Sequence[Line], depths: Sequence[int]) -> list[Continuation]:
        """The `depths` tokens that follow each committed text; nothing where it can't tell. Waits.

        What fails in company is tried alone; who fails alone is followed no more, and its request goes on without.
        """
        for line, depth in zip(lines, depths, strict=True):
            room = self.head.context_length - len(line.tokens)
            line.depth = min(depth, room, self._way.depth) if line.follower.is_up_to(line.tokens) else 0
        # Rows of the buffers are fed in their order.
        able = sorted((line for line in lines if line.depth > 0), key=lambda line: line.follower.text.row)
        try:
            self._grow(able)
        except OutriderError as error:
            log.warning("%s%s", error, "; each is tried alone" if len(able) > 1 else "")
            for line in able:
                self._grow_alone(line, able)
        return [line.continuation for line in lines]

    def _grow_alone(self, line: Line, company: Sequence[Line]) -> None:
        line.picks.clear()
        try:
            if len(company) > 1:
                self._grow([line])
                return
        except OutriderError as error:
            log.warning("%s", error)
        log.warning("the head stops drafting for this request")
        line.picks.clear()
        line.follower.close()

    def _grow(self, lines: Sequence[Line]) -> None:
        if not lines:
            return
        followers = [line.follower for line in lines]
        with named_errors("the head's reading"):
            feeds = [line.follower.catch_up(line.tokens) for line in lines]
        read = [follower.length for follower in followers]
        try:
            with named_errors("the head's forward"):
                begun = [feed.text.length + feed.count * feed.stays for feed in feeds]
                sound = mx.isfinite(self._way.draft(lines, feeds)).all()
                mx.eval(sound, [pick.arrays for line in lines for pick in line.picks])
            if not sound.item():
                raise ModelFault(_NO_NUMBERS)
            read = begun
            for follower in followers:
                follower.has_read()
        finally:
            for follower, length in zip(followers, read, strict=True):
                follower.text.roll_back(length)
