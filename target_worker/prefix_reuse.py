"""What requests need not read of their prompts: cached prefixes, and what a prefill worker has read.

A prompt that begins like one that is being read waits for it, so a system prompt is read once, however many requests
arrive with it. `KVImport` appends a prefill worker's keys and values to a text. What does not fit costs only time: the
target reads on from where the text ends. Knows requests and the prompt cache; nothing of forwards or messages' order.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from outrider.engine.kv_cache import FlatKVCache, KVCache
from outrider.engine.kv_transfer import KVLayout
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import LEAST, PromptCache, common
from outrider.protocol.errors import OutriderError, named_errors
from outrider.protocol.messages import PromptKv
from outrider.target_worker.target_request import AwaitedPrefix, TargetRequest

log = logging.getLogger(__name__)


class PrefixReuse:
    """Opens and closes requests with `cache`. `context`: the longest text that the model takes."""

    def __init__(self, cache: PromptCache, context: int) -> None:
        self.cache = cache
        self._context = context

    def open(self, running: TargetRequest, others: Iterable[TargetRequest]) -> None:
        """Begins with the cached prefix of the prompt, or waits until another request has read it."""
        slot = running.slot
        if self.cache.is_on:
            running.awaits = _reader(running, others)
        if running.awaits is None:
            self.begin(running)
        self.cache.enter(slot, min(running.opened.prompt_len + running.opened.sampling.max_tokens, self._context))

    def begin(self, running: TargetRequest) -> None:
        """Begins with the longest cached prefix. Raises OutriderError when that fails."""
        running.awaits = None
        start = self.cache.find(running.slot.tokens)
        if start is not None:
            with named_errors("copying from the prompt cache"):
                running.slot.begin(start)
            running.cached = running.slot.fed

    def read(self, running: TargetRequest) -> None:
        """A prompt has been read to its end. State that can't be cut is kept now, for requests with the same prompt."""
        if not (running.slot.sequence.exact or running.unread or running.over):
            self._keep(running)

    def close(self, running: TargetRequest, spoilt: bool) -> None:
        """Keeps the text's state for later ones, unless a failure may have `spoilt` it."""
        self.cache.leave(running.slot)
        if not spoilt:
            self._keep(running)
        running.slot.close()

    def _keep(self, running: TargetRequest) -> None:
        slot = running.slot
        known = slot.tokens[: slot.fed]
        if not self.cache.wants(known):
            return
        try:
            with named_errors("copying from the prompt cache"):
                self.cache.keep(known, slot.save(len(known)))
        except OutriderError as error:
            log.warning("%s; it will be read again", error)


def _reader(running: TargetRequest, others: Iterable[TargetRequest]) -> AwaitedPrefix | None:
    """The request that will read most of the beginning of this one's prompt."""
    wanted, found = np.array(running.slot.tokens[:-1], np.int32), None
    for other in others:
        if other.unread and other.slot.sequence.exact:
            shared = common(np.array(other.slot.tokens[:-1], np.int32), wanted)
            if shared >= max(LEAST, other.slot.fed + 1) and (found is None or shared > found.tokens):
                found = AwaitedPrefix(other, shared)
    return found


class KVImport:
    """Fills the `kv_cache` of `model`."""

    def __init__(self, model: LoadedModel, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache if isinstance(kv_cache, FlatKVCache) else None
        self._layout = KVLayout.of(model.model) if self._kv_cache is not None else None

    @property
    def is_possible(self) -> bool:
        """Whether the texts' only state is keys and values in this process."""
        return self._kv_cache is not None

    def take(self, running: TargetRequest, message: PromptKv) -> None:
        """Appends these to the text, as far as it lacks them; after a gap or a misfit it waits for no more."""
        slot = running.slot
        skip = slot.fed - message.start
        if self._kv_cache is None or self._layout is None or skip < 0:
            running.offered = False
            return
        count = min(message.count - skip, running.unread)
        if count <= 0:
            return
        try:
            with named_errors("receiving the prompt's keys and values"):
                layers = self._layout.unpack(message.data, message.count)
                own = tuple((k[..., skip : skip + count, :], v[..., skip : skip + count, :]) for k, v in layers)
                self._kv_cache.extend(slot.sequence, own, count)
        except OutriderError as error:
            log.warning("%s; the target reads the prompt from token %d on", error, slot.fed)
            running.offered = False
