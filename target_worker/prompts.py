"""What requests need not read of their prompts: what is remembered, and what a prefill worker hands over.

A prompt that begins like one that is being read waits until that one has come so far: a system prompt is read once,
however many arrive together with it. Knows requests and the prompt cache; nothing of forwards or messages.

`Handover`: what a prefill worker hands over of a prompt: it becomes a text's own keys and values, in the order of the
tokens. Whatever does not fit costs time only: the target reads on by itself from where the text stands.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from outrider.engine.handover import Layout
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import LEAST, PromptCache, common
from outrider.engine.texts import FlatTexts, Texts
from outrider.protocol.errors import OutriderError, named_errors
from outrider.protocol.messages import PromptKv
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


class Handover:
    """For the `texts` of `model`."""

    def __init__(self, model: LoadedModel, texts: Texts) -> None:
        self._texts = texts if isinstance(texts, FlatTexts) else None
        self._layout = Layout.of(model.model) if self._texts is not None else None

    @property
    def is_possible(self) -> bool:
        """Whether the texts remember keys and values in this process, and nothing else."""
        return self._texts is not None

    def take(self, running: Running, message: PromptKv) -> None:
        """The text goes on with these, as far as it lacks them; after a gap, or a misfit, it waits for no more."""
        slot = running.slot
        skip = slot.fed - message.start
        if self._texts is None or self._layout is None or skip < 0:
            running.offered = False
            return
        count = min(message.count - skip, running.unread)
        if count <= 0:
            return
        try:
            with named_errors("receiving the prompt's keys and values"):
                layers = self._layout.unpack(message.data, message.count)
                own = tuple((k[..., skip : skip + count, :], v[..., skip : skip + count, :]) for k, v in layers)
                self._texts.extend(slot.text, own, count)
        except OutriderError as error:
            log.warning("%s; the target reads the prompt from token %d on", error, slot.fed)
            running.offered = False
