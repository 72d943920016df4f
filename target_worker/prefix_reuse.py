"""The parts of prompts that need not be read: cached prefixes, and what a prefill worker has read.

A prompt that shares a prefix with one being read waits for it, so that a system prompt is read once for any number
of requests. `KVImport` appends a prefill worker's keys and values to a text. If they don't fit, only time is lost: the
target continues from the end of the text. Knows requests and the prompt cache; knows nothing of forwards or the order
of messages.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

from outrider.engine.kv_cache import FlatKVCache, KVLayout
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import MIN_PREFIX_TOKENS, PromptCache, common_prefix_length
from outrider.protocol.errors import OutriderError, wrap_model_errors
from outrider.protocol.messages import PromptKv
from outrider.target_worker.target_request import AwaitedPrefix, TargetRequest

log = logging.getLogger(__name__)


class PrefixReuse:
    """Opens and closes requests with `cache`. `context`: the model's context length."""

    def __init__(self, cache: PromptCache, context: int) -> None:
        self.cache = cache
        self._context = context

    def open(self, running: TargetRequest, others: Iterable[TargetRequest]) -> None:
        """Uses the cached prefix of the prompt, or waits until another request has read it.

        A request that wants its prompt's log-probabilities reads all of it.
        """
        slot = running.slot
        if not running.wants_prompt_logprobs:
            if self.cache.is_on:
                running.awaits = _find_reader(running, others)
            if running.awaits is None:
                self.begin(running)
        self.cache.enter(slot, min(running.opened.prompt_len + running.opened.sampling.max_tokens, self._context))

    def begin(self, running: TargetRequest) -> None:
        """Copies the longest cached prefix. Raises OutriderError if that fails."""
        running.awaits = None
        start = self.cache.find(running.slot.tokens)
        if start is not None:
            with wrap_model_errors("copying from the prompt cache"):
                running.slot.begin(start)
            running.cached = running.slot.fed

    def read(self, running: TargetRequest) -> None:
        """Saves state that can't be shortened, for requests with the same prompt, once a prompt has been read."""
        if not (running.slot.sequence.exact or running.unread or running.is_closed):
            self._save(running)

    def close(self, running: TargetRequest, spoilt: bool) -> None:
        """Closes a request, and saves its text's state for later ones unless a failure may have `spoilt` it."""
        self.cache.leave(running.slot)
        if not spoilt:
            self._save(running)
        running.slot.close()

    def _save(self, running: TargetRequest) -> None:
        slot = running.slot
        known = slot.tokens[: slot.fed]
        if not self.cache.wants(known):
            return
        try:
            with wrap_model_errors("copying to the prompt cache"):
                self.cache.keep(known, slot.save(len(known)))
        except OutriderError as error:
            log.warning("%s; the text is not cached", error)


def _find_reader(running: TargetRequest, others: Iterable[TargetRequest]) -> AwaitedPrefix | None:
    """Returns the request that will read the longest part of the beginning of this one's prompt."""
    wanted, best = np.array(running.slot.tokens[:-1], np.int32), None
    for other in others:
        if other.unread and other.slot.sequence.exact:
            shared = common_prefix_length(np.array(other.slot.tokens[:-1], np.int32), wanted)
            if shared >= max(MIN_PREFIX_TOKENS, other.slot.fed + 1) and (best is None or shared > best.tokens):
                best = AwaitedPrefix(other, shared)
    return best


class KVImport:
    """Imports keys and values into the `kv_cache` of `model`, in which they are a text's only state."""

    def __init__(self, model: LoadedModel, kv_cache: FlatKVCache) -> None:
        self._kv_cache, self._layout = kv_cache, KVLayout.of(model.model, model.cpu)

    def take(self, running: TargetRequest, message: PromptKv) -> None:
        """Appends the part that the text lacks; after a gap or an error the target reads the rest."""
        slot = running.slot
        skip = slot.fed - message.start
        if skip < 0:
            running.offered = False
            return
        count = min(message.count - skip, running.unread)
        if count <= 0:
            return
        try:
            with wrap_model_errors("receiving the prompt's keys and values"):
                layers = self._layout.unpack(message.data, message.count)
                own = tuple((k[..., skip : skip + count, :], v[..., skip : skip + count, :]) for k, v in layers)
                self._kv_cache.extend(slot.sequence, own, count)
        except OutriderError as error:
            log.warning("%s; the target reads the prompt from token %d on", error, slot.fed)
            running.offered = False
