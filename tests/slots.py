"""Slots with prompts that have been read, without a worker."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.kv_cache import CacheSlot, KVCache, SeparateKVCache
from outrider.engine.load_checks import probe_abilities
from outrider.engine.loading import LoadedModel
from outrider.protocol.sampling import SamplingParams


def open_slots(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    kv_cache: KVCache | None = None,
) -> list[CacheSlot]:
    """Slots that have been fed all of their prompts except for the last token.

    Without a KV cache each text has its own forwards, by MLX.
    """
    held = kv_cache or SeparateKVCache(model.model, probe_abilities(model).own_caches)
    slots = [CacheSlot(model, held, prompt, chosen) for prompt, chosen in zip(prompts, params, strict=True)]
    for slot in slots:
        slot.feed_all_but_last()
    return slots
