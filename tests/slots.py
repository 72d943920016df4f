"""Cache slots and token trees with processed prompts, without a worker."""

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
from outrider.engine.verify import VerifyInput, VerifyOutput, begin_forward
from outrider.protocol.errors import OutriderError
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.trees import SparseQ


def open_slots(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    kv_cache: KVCache | None = None,
) -> list[CacheSlot]:
    """Returns slots that have been fed all of their prompts except for the last token.

    Without `kv_cache`, each slot has its own MLX cache and its own forwards.
    """
    cache = kv_cache or SeparateKVCache(model.model, own_caches=not probe_abilities(model).chains)
    slots = [CacheSlot(model, cache, prompt, chosen) for prompt, chosen in zip(prompts, params, strict=True)]
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
    """Returns a tree of the model that has read these tokens. Without `draws`, it proposes the likeliest tokens,
    whatever the sampling parameters are. Without `kv_rows`, it uses the model's own."""
    sampler = Sampler(params, model.vocab_size, normalised=False)
    tree = Tree(kv_rows or open_kv_rows(model), sampler, model.context_length, draws, cache)
    tree.read_all(tokens)
    return tree


def open_draft_tree(drafter: Drafter, tokens: Sequence[int], sampling: SamplingParams, **others: Any) -> Any:
    """Returns a drafter's tree that has read these tokens."""
    tree = drafter.open(tokens, sampling, **others)
    while tree.committed_len < len(tokens):
        tree.read(tokens[tree.committed_len :])
    return tree


def verify(
    slot: CacheSlot, chain: Sequence[int] = (), q: SparseQ | None = None, parents: Sequence[int] = ()
) -> VerifyOutput:
    """Runs one forward over one slot's last committed token and a chain; accepts tokens while they are the target's.

    The slot commits the accepted tokens and the bonus token, and rolls back the rest. An empty chain is a plain step.

    Args:
        q: what the chain's tokens were drawn from, for residual sampling.
        parents: the tokens are a tree, in which the branch of the target's own tokens is accepted.

    Raises:
        ModelFault: the model's logits are NaN or infinite.
        InvalidRequest: the chain does not fit the slot's sampling rule, or the tree is invalid.
    """
    (output,) = begin_forward([VerifyInput(slot, tuple(chain), q, tuple(parents))]).commit()
    if isinstance(output, OutriderError):
        raise output
    return output
