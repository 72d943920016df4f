"""What requests need not read of their prompts: ended ones have left it, or one that runs has read it.

A prompt that begins like one that is being read waits until that one has come so far: a system prompt is read once,
however many arrive together with it. Knows requests and the prompt cache; nothing of forwards or messages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from outrider.engine.prompt_cache import LEAST, PromptCache, common
from outrider.protocol.errors import OutriderError
from outrider.protocol.guard import named_errors
from outrider.target_worker.running import Awaited, Running

log = logging.getLogger(__name__)


class Prompts:
    """The beginnings and the ends of requests on `cache`. `context`: the longest text that the model takes."""

    def __init__(self, cache: PromptCache, context: int) -> None:
        self.cache = cache
        self._context = context

    def open(self, running: Running, others: Iterable[Running]) -> None:
        """Begins with what is remembered of the prompt, at once or when somebody else has read it."""
        slot = running.slot
        if self.cache.is_on:
            running.awaits = _reader(running, others)
        if running.awaits is None:
            self.begin(running)
        self.cache.enter(slot, min(running.opened.prompt_len + running.opened.sampling.max_tokens, self._context))

    def begin(self, running: Running) -> None:
        """Begins with the most that is remembered by now. Raises OutriderError when that fails."""
        running.awaits = None
        start = self.cache.find(running.slot.tokens)
        if start is not None:
            with named_errors("copying from the prompt cache"):
                running.slot.begin(start)
            running.cached = running.slot.fed

    def read(self, running: Running) -> None:
        """A prompt has been read to its end. A state that can't be cut is kept here, for who asks the same again."""
        if not (running.slot.text.exact or running.unread or running.over):
            self._keep(running)

    def close(self, running: Running, spoilt: bool) -> None:
        """What is remembered of the text stays for later ones, unless a failure may have `spoilt` it."""
        self.cache.leave(running.slot)
        if not spoilt:
            self._keep(running)
        running.slot.close()

    def _keep(self, running: Running) -> None:
        slot = running.slot
        known = slot.tokens[: slot.fed]
        if not self.cache.wants(known):
            return
        try:
            with named_errors("copying from the prompt cache"):
                self.cache.keep(known, slot.save(len(known)))
        except OutriderError as error:
            log.warning("%s; it will be read again", error)


def _reader(running: Running, others: Iterable[Running]) -> Awaited | None:
    """The request that is about to read most of what this one begins with."""
    wanted, found = np.array(running.slot.tokens[:-1], np.int32), None
    for other in others:
        if other.unread and other.slot.text.exact:
            shared = common(np.array(other.slot.tokens[:-1], np.int32), wanted)
            if shared >= max(LEAST, other.slot.fed + 1) and (found is None or shared > found.tokens):
                found = Awaited(other, shared)
    return found
