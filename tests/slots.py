"""Slots and trees with prompts that have been read, without a worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.drafters.drafter import Drafter
from outrider.engine.kv_cache import CacheSlot, KVCache, SeparateKVCache
from outrider.engine.kv_rows import KVRows
from outrider.engine.load_checks import open_kv_rows, probe_abilities
from outrider.engine.loading import LoadedModel
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree
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


def open_tree(
    model: LoadedModel,
    tokens: Sequence[int],
    params: SamplingParams,
    draws: Draws | None = None,
    cache: PromptCache | None = None,
    kv_rows: KVRows | None = None,
) -> Tree:
    """A tree that has read these tokens, with the model's usual rows or these; without `draws` it proposes its best
    tokens, whatever the parameters."""
    sampler = Sampler(params, model.vocab_size, normalised=False)
    tree = Tree(kv_rows or open_kv_rows(model), sampler, model.context_length, draws, cache)
    tree.read_all(tokens)
    return tree


def open_read(drafter: Drafter, tokens: Sequence[int], sampling: SamplingParams, **others: Any) -> Any:
    """A drafter's tree that has read these tokens."""
    tree = drafter.open(tokens, sampling, **others)
    while tree.committed_len < len(tokens):
        tree.read(tokens[tree.committed_len :])
    return tree
