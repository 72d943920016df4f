"""Checks at load what a model can do, and chooses the fastest form of its texts and trees that passes.

Forms are compared with plain forwards (`logits_match`). This catches models whose attention ignores the mask, the
positions or the columns that it is given, whose attention is not mlx-lm's common one, or whose layers mix the tokens of
a row in another way. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.cache import KVCache as MlxKVCache
from msgspec import structs

from outrider.engine.cache import flatten_caches
from outrider.engine.flat import FlatCache
from outrider.engine.kv_cache import Feed, FlatKVCache, KVCache, SeparateKVCache
from outrider.engine.kv_rows import DenseKVRows, JointKVRows, KVRows, PromptReader, RecurrentKVRows
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.check import deviations, feed_in_pieces
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree
from outrider.protocol.errors import CannotDraft, ModelError, ModelFault, OutriderError, first_line, wrap_model_errors
from outrider.protocol.messages import Abilities
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import TreeFeed

log = logging.getLogger(__name__)

_TEXT_TOKENS, _FINAL_TOKENS, _REJECTED_TOKENS = 9, 6, 3  # tokens: before the filler, after it, and rejected
_CHAIN_TOLERANCE_FLOAT32, _CHAIN_TOLERANCE_HALF = 1e-3, 0.3  # allowed `deviations`: float32, and lower precision
_WINDOW_ATTRIBUTES = ("max_size", "chunk_size", "window_size")  # the attributes of mlx-lm's caches
_TOKENS_PAST_WINDOW = 64  # tokens of a filler that are outside the window
_MAX_FILLED_WINDOW = 4096  # larger windows are not tried: keys and values would take gigabytes
_MAX_READ_WINDOW = 512  # the same if a cache can't be filled, so that the filler has to be fed
_WINDOW_EDGE_TOKENS, _EDGE_VALUE_FACTOR = 16, 300.0  # larger values there reveal an error of one token

Filler = list[tuple[mx.array, mx.array] | None] | list[int]
"""What lies between a text's first and last tokens: keys and values of each cache that has them, or tokens."""

_TREE_PROMPT_TOKENS, _TREE_BRANCHES, _TREE_DEPTH = 9, 3, 2
_LOGITS_TOLERANCE_FLOAT32, _LOGITS_TOLERANCE_HALF, _LOGITS_TOLERANCE_INT8 = 3e-5, 0.03, 0.3  # allowed `deviations`
_BATCH_LENGTHS = (9, 3, 6)
_GROWTH_TOKENS = 256

TreeForm = type[DenseKVRows]


@cache
def probe_abilities(model: LoadedModel) -> Abilities:
    """Returns what this model can do as a target, tried once. The reference is its own caches, fed one token at a time.

    It can verify chains if caches that roll back give the right logits; else it decodes with its own caches. If layers
    have a window, everything is tried past the window, too, after repeated keys and values, because computing so many
    would take minutes.

    Raises:
        ModelError: the model can't decode: its forward fails, or its logits are NaN or infinite.
    """
    if model.cpu is not None:  # `engine.ort` compares a chain at load, and flat buffers roll back at once
        return Abilities(all_cores=model.cpu.has_all_cores)
    with wrap_model_errors(f"a forward of this {model.model_type} model"):
        trials = [(before, _compute_reference(model, before)) for before in _make_fillers(model)]
    try:
        with wrap_model_errors("a trial forward", logging.INFO):
            for before, reference in trials:
                _check_chain(model, before, reference)
        return Abilities()
    except OutriderError as error:
        why = f"a {model.model_type} model can't verify several tokens at once ({error}), so it decodes token by token"
        return Abilities(chains=False, why=why)
    finally:
        mx.clear_cache()


def _compute_reference(model: LoadedModel, before: Filler) -> mx.array:
    """Returns the model's own logits of the tokens after the filler, fed one by one, [N, V]."""
    text = _TrialText(model, before, own_caches=True)
    reference = mx.concatenate([text.feed([token]) for token in _make_tokens(model, _FINAL_TOKENS, 1)])
    if mx.isnan(reference).any().item():
        raise ModelFault(
            f"the logits of this {model.model_type} model are NaN or infinite; download it again, or choose another"
        )
    return reference.astype(mx.float32)


def _check_chain(model: LoadedModel, before: Filler, reference: mx.array) -> None:
    """Feeds token by token, then a chain that is rolled back after its first token.

    Raises:
        ModelFault: the logits differ from the `reference`.
    """

    def compare(start: int, logits: mx.array, tokens: str) -> None:
        own = reference[start : start + logits.shape[0]]
        worst = float(deviations(own, logits).max())
        if not worst <= (_CHAIN_TOLERANCE_FLOAT32 if logits.dtype == mx.float32 else _CHAIN_TOLERANCE_HALF):
            past = " past its window" if before else ""
            raise ModelFault(f"the logits of {tokens}{past} are wrong by {worst:.1g} of their standard deviation")

    last = _make_tokens(model, _FINAL_TOKENS, 1)
    text = _TrialText(model, before)
    compare(0, mx.concatenate([text.feed([token]) for token in last]), "one token at a time")
    text = _TrialText(model, before)
    base = text.sequence.length
    text.sequence.mark()
    wrong = [(token + 1) % model.vocab_size for token in last[1 : 1 + _REJECTED_TOKENS]]
    compare(0, text.feed([last[0], *wrong])[:1], "several tokens at once")
    text.sequence.roll_back(base + 1)
    done = text.sequence.length - base
    compare(done, text.feed(last[done:]), "tokens after a rejected chain")


def _make_fillers(model: LoadedModel) -> list[Filler]:
    """Returns an empty filler, and one that is longer than the model's windows if it has any."""
    text = _TrialText(model, None, own_caches=True)
    window = max((getattr(leaf, name, 0) for leaf in text.leaves for name in _WINDOW_ATTRIBUTES), default=0)
    fillable = all(isinstance(leaf, ArraysCache) or hasattr(leaf, "update_and_fetch") for leaf in text.leaves)
    if not window:
        return [[]]
    if window > (_MAX_FILLED_WINDOW if fillable else _MAX_READ_WINDOW):
        log.info("a window of %d tokens is too long to be tried", window)
        return [[]]
    if not fillable:
        return [[], [7 * i % model.vocab_size for i in range(window + _TOKENS_PAST_WINDOW)]]
    text.feed(_make_tokens(model, _TEXT_TOKENS))
    return [
        [],
        [_repeat_kv(leaf, i, window) if hasattr(leaf, "keys") else None for i, leaf in enumerate(text.leaves)],
    ]


def _repeat_kv(leaf: Any, seed: int, window: int) -> tuple[mx.array, mx.array]:
    """Returns the keys and values in the cache, repeated in random order for more tokens than a window has.

    Not drawn from a normal distribution: with such keys Gemma 3 gives all attention to few tokens, and rounding alone
    changes its logits as much as an error would.
    """
    columns = window + _TOKENS_PAST_WINDOW
    order = mx.random.randint(0, _TEXT_TOKENS, (columns,), key=mx.random.key(seed))
    keys, values = leaf.keys[:, :, order], leaf.values[:, :, order]
    is_edge = mx.arange(columns) < _TOKENS_PAST_WINDOW + _WINDOW_EDGE_TOKENS
    return keys, values * mx.where(is_edge, _EDGE_VALUE_FACTOR, 1.0)[:, None].astype(values.dtype)


class _TrialText:
    """A text with caches of its own, which begins with `_TEXT_TOKENS` tokens and `before`; None: it is empty."""

    def __init__(self, model: LoadedModel, before: Filler | None, own_caches: bool = False) -> None:
        self._kv_cache = SeparateKVCache(model.model, own_caches)
        self.sequence = self._kv_cache.open()
        self.leaves = [leaf for cache in self.sequence.caches for leaf in flatten_caches(cache)]
        if before is None:
            return
        pairs = [entry for entry in before if not isinstance(entry, int)]
        self.feed(_make_tokens(model, _TEXT_TOKENS) + [entry for entry in before if isinstance(entry, int)])
        for leaf, pair in zip(self.leaves if pairs else (), pairs, strict=True):
            if isinstance(leaf, FlatCache) and pair is not None:
                leaf.adopt(self.sequence.row, *pair, self.sequence.length)
            elif pair is not None:
                leaf.update_and_fetch(*pair)
        self.sequence.length += next((keys.shape[2] for keys, _ in filter(None, pairs)), 0)

    def feed(self, tokens: list[int]) -> mx.array:
        """Feeds tokens, and returns their logits [N, V], evaluated."""
        logits = self._kv_cache.forward([Feed(self.sequence, tokens, len(tokens))])
        mx.eval(logits, self._kv_cache.state())
        return logits


def _make_tokens(model: LoadedModel, count: int, number: int = 0) -> list[int]:
    """Returns the tokens of meaningless text number `number`."""
    return [(7919 * i + 104729 * number + 13) % model.vocab_size for i in range(count)]


def tree_logits_match(model: LoadedModel, form: TreeForm, prompt: int = _TREE_PROMPT_TOKENS) -> bool:
    """Returns whether greedy trees of this form have the model's own logits up to rounding, alone and, after a commit,
    in shared forwards.

    `prompt`: the number of tokens that the shorter tree is opened with.
    """
    texts = [_make_tokens(model, prompt + 5 * number, number) for number in range(2)]
    sampler, agrees = Sampler(SamplingParams(), model.vocab_size, normalised=False), True
    trees = [Tree(form(model), sampler, model.context_length) for _ in texts]
    for tree, text in zip(trees, texts, strict=True):
        tree.read_all(text)
    drafted = iter(_make_tokens(model, 4 * _TREE_BRANCHES * _TREE_DEPTH, 2))
    for together in (False, True):
        branches = [[[(tree.root, 0)]] * (_TREE_BRANCHES - number) for number, tree in enumerate(trees)]
        for _ in range(_TREE_DEPTH):
            feeds = [TreeFeed([path[-1][0] for path in own], list(islice(drafted, len(own)))) for own in branches]
            if together:
                fed = Tree.feed_together(trees, feeds)
            else:
                fed = [tree.feed(feed.parents, feed.tokens) for tree, feed in zip(trees, feeds, strict=True)]
            for own, nodes, feed in zip(branches, fed, feeds, strict=True):
                pairs = zip(nodes, cast(list[int], feed.tokens), strict=True)
                own[:] = [[*path, pair] for path, pair in zip(own, pairs, strict=True)]
        for tree, text, own in zip(trees, texts, branches, strict=True):
            paths = [([node for node, _ in path], [token for _, token in path[1:]]) for path in own]
            for nodes, tokens in paths:
                scores = mx.stack([tree.scores(node) for node in nodes])
                agrees = agrees and logits_match(model, [*text, *tokens], scores)
            tree.commit(paths[1][0][1:])
            text += paths[1][1]
    for tree in trees:
        tree.close()
    return agrees


def logits_match(model: LoadedModel, text: Sequence[int], logits: mx.array) -> bool:
    """Returns whether logits [R, V] are those of the last R tokens in a plain forward of `text`, up to rounding."""
    rows = len(logits)
    if model.cpu is not None:  # compared with the model itself at load
        own = mx.array(feed_in_pieces(model.cpu, np.array(text, np.int32), (len(text),), num_logits=rows))
    else:
        own = model.model(mx.array([list(text)]), cache=make_prompt_cache(model.model))[0, -rows:]
    allowed = _LOGITS_TOLERANCE_FLOAT32 if own.dtype == mx.float32 else _LOGITS_TOLERANCE_HALF
    if model.cpu is not None and model.cpu.quantised:  # sums in another order change the rounding to 8 bits
        allowed = _LOGITS_TOLERANCE_INT8
    return bool((deviations(own, logits) <= allowed).all())


def batch_logits_match(model: LoadedModel) -> bool:
    """Returns whether texts that share forwards have the model's own logits, up to rounding.

    Tries a piece of a prompt, chains of different lengths, a rollback, and closing a text.
    """
    kv_cache = FlatKVCache(model.model)
    tokens = [_make_tokens(model, length + 4, n) for n, length in enumerate(_BATCH_LENGTHS)]
    sequences = [kv_cache.open() for _ in tokens]

    def feed(*parts: tuple[int, int, bool]) -> bool:
        """Feeds each text n up to `end`; returns whether all wanted logits are the model's own."""
        feeds = [
            Feed(sequences[n], tokens[n][sequences[n].length : end], 0 if cut else 1, cut) for n, end, cut in parts
        ]
        logits = kv_cache.forward(feeds)
        read = [(n, end) for n, end, cut in parts if not cut]
        return all(logits_match(model, tokens[n][:end], logits[i : i + 1]) for i, (n, end) in enumerate(read))

    feed((0, 5, True))
    agrees = feed((1, 3, False), (0, 9, True)) and feed((0, 10, False), (1, 6, False), (2, 6, False))
    sequences[1].roll_back(4)
    kv_cache.close(sequences[0])
    agrees = agrees and feed((1, 5, False), (2, 9, False))
    kv_cache.close(sequences[1])
    kv_cache.close(sequences[2])
    return agrees


def _find_fault(model: LoadedModel, what: str, agrees: Callable[[], bool]) -> str:
    """Runs the check `agrees` of the form `what`. Returns "", or why the form fails.

    What a form has changed in the model's modules stays: it does nothing in other forms' forwards.
    """
    reason = "its logits are wrong"
    try:
        with wrap_model_errors(what, logging.INFO):
            if agrees():
                return ""
    except ModelError as error:
        reason = first_line(error)
    log.info("%s can't be used with this %s model: %s", what, model.model_type, reason)
    return reason


def open_kv_cache(model: LoadedModel) -> FlatKVCache | SeparateKVCache:
    """Opens an empty KV cache, whose form is found once for each model. Texts share forwards if the logits stay right;
    the target verifies trees of drafts if its trees can share forwards."""
    return _find_cache_form(model)()


@cache
def _find_cache_form(model: LoadedModel) -> Callable[[], FlatKVCache | SeparateKVCache]:
    if model.cpu is not None:
        # `engine.ort` checked texts in one forward at load. If logits are rounded, branches differ from chains.
        trees = not model.cpu.quantised and not _find_tree_fault(model, "trees of drafts", JointKVRows)
        return partial(FlatKVCache, model.model, trees, model.cpu)
    chains, kinds = probe_abilities(model).chains, MlxKVCache | RotatingKVCache
    plain = model.attention_only and all(isinstance(cache, kinds) for cache in make_prompt_cache(model.model))
    if not chains or not plain:
        return partial(SeparateKVCache, model.model, own_caches=not chains)
    if _find_fault(model, "texts in one forward", partial(batch_logits_match, model)):
        return partial(SeparateKVCache, model.model)
    return partial(FlatKVCache, model.model, not _find_tree_fault(model, "trees of drafts", JointKVRows))


def measure_sequence_cost(kv_cache: KVCache) -> KvCost:
    """Returns the memory that a text takes. Measures how fast state that can't be shortened grows.

    Texts of one buffer take as much as the longest one, except with ONNX Runtime on Linux (`FlatCache.release`).
    """
    sequence: Any = kv_cache.open()
    kv_cache.forward([Feed(sequence, [0], 0, True)])
    short = kv_cache.save(sequence, 1)
    cost = short.cost
    if short.states:
        kv_cache.forward([Feed(sequence, [0] * _GROWTH_TOKENS, 0, True)])
        grown = kv_cache.save(sequence, 1 + _GROWTH_TOKENS).nbytes - short.nbytes
        cost = KvCost(max(short.nbytes - grown // _GROWTH_TOKENS, 0), grown // _GROWTH_TOKENS)
    kv_cache.close(sequence)
    padded = isinstance(kv_cache, FlatKVCache) and (kv_cache.cpu is None or sys.platform != "linux")
    return structs.replace(cost, padded=padded)


@cache
def find_tree_form(model: LoadedModel) -> TreeForm:
    """Returns the first form of KV rows for a drafter's trees that has this model's logits; found once for each model.

    Raises:
        CannotDraft: no form reproduces this model's logits.
    """
    forms: list[TreeForm] = [JointKVRows, DenseKVRows, RecurrentKVRows] if model.attention_only else [RecurrentKVRows]
    reason = ""
    for form in forms:
        if not (reason := _find_tree_fault(model, "a tree of it", form)):
            return form
    raise CannotDraft(f"a {model.model_type} model can't be a draft model ({reason}); choose another")


def _find_tree_fault(model: LoadedModel, what: str, form: TreeForm) -> str:
    """Returns why trees of this form fail, or ""."""
    return _find_fault(model, what, partial(tree_logits_match, model, form))


def open_kv_rows(model: LoadedModel, reader: PromptReader | None = None) -> KVRows:
    """Opens empty KV rows for one tree. `reader`: reads prompts instead of the model, if that is faster.

    Raises ModelError as `find_tree_form` does.
    """
    kv_rows = find_tree_form(model)(model)
    if not kv_rows.has_extra_state:  # a recurrent state comes from the model alone
        kv_rows.reader = reader
    return kv_rows


def measure_tree_cost(model: LoadedModel) -> KvCost:
    """Returns the memory that a tree of this model takes. Raises ModelError as `find_tree_form` does."""
    kv_rows = open_kv_rows(model)
    kv_rows.prefill([0])
    return kv_rows.save(1).cost
