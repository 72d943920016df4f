"""Checks at load what a model can do, and chooses the fastest form of its texts and trees that passes.

`abilities` tries a model as a target, and compares with its own caches fed one token at a time. It chooses the simplest
caches with the right logits: those that roll back at once, else the model's own, copied before each chain, else the
model's own without chains. If layers have a window, everything is tried past the window, too, after made-up keys and
values, because computing so many would take minutes.

`open_kv_cache` opens a target's KV cache: texts share forwards if the logits stay right (`batch_agrees`). `open_tree`
opens a drafter's token tree in the first form of `KVRows` that reproduces the model's logits (`tree_agrees`), or
refuses; a target verifies trees of drafts if such trees of it can share forwards. These checks compare with plain
forwards (`are_own`). They catch models whose attention ignores the mask, the positions or the columns it is given,
whose attention is not mlx-lm's common one, or whose layers mix the tokens of a row in another way. `fault` runs a check
and undoes a failed form's changes to the model. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.cache import KVCache as MlxKVCache

from outrider.engine.cache import leaves_of
from outrider.engine.flat import FlatCache
from outrider.engine.kv_cache import Feed, FlatKVCache, KVCache, SeparateKVCache
from outrider.engine.kv_rows import DenseKVRows, JointKVRows, KVRows, PromptReader, ReadProgress, RecurrentKVRows
from outrider.engine.loading import LoadedModel, once
from outrider.engine.ort.forward import alone, deviations
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import (
    CannotDraft,
    InvalidRequest,
    ModelError,
    ModelFault,
    OutriderError,
    first_line,
    named_errors,
)
from outrider.protocol.messages import Abilities
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import TreeFeed

log = logging.getLogger(__name__)

_TEXT, _STEPS, _WRONG = 9, 6, 3
_TRUE, _ROUGH = 1e-3, 0.3  # allowed `deviations`: float32, and lower precision
_WINDOWS = ("max_size", "chunk_size", "window_size")  # the attributes of mlx-lm's caches
_PAST = 64  # tokens that no window reaches
_LARGEST = 4096  # larger windows are not tried: the made-up text would take gigabytes
_LARGEST_READ = 512  # the same if a cache can't be filled, and the text has to be read
_EDGE, _LOUD = 16, 30.0  # values this far into the window are this much larger, so that an error of one token shows


@once
def abilities(model: LoadedModel) -> Abilities:
    """Returns what this model can do, tried once.

    Raises:
        ModelError: the model can't decode: its forward fails, or its logits are NaN or infinite.
    """
    if model.cpu is not None:
        return Abilities()  # `engine.ort` checks chains and rollbacks at load
    with named_errors(f"a forward of this {model.model_type} model"):
        trials = [(before, _truth(model, before)) for before in _befores(model)]
    reason = ""
    for own_caches in (False, True):
        try:
            with named_errors("a trial forward", logging.INFO):
                for before, truth in trials:
                    _try_chain(model, before, truth, own_caches)
            return Abilities(own_caches=own_caches)
        except OutriderError as error:
            reason = str(error)
            log.info("a %s target can't verify (own caches: %s): %s", model.model_type, own_caches, reason)
        finally:
            mx.clear_cache()
    why = f"a {model.model_type} model can't verify several tokens at once ({reason}), so it decodes token by token"
    return Abilities(chains=False, own_caches=True, why=why)


Before = list[tuple[mx.array, mx.array] | None] | list[int]
"""What follows a text's first `_TEXT` tokens: keys and values of each cache that has them, or tokens."""


def _truth(model: LoadedModel, before: Before) -> mx.array:
    """Returns the model's own logits of the `_STEPS` tokens after these, fed one by one, [_STEPS, V]."""
    text = _Text(model, before, own_caches=True)
    truth = mx.concatenate([text.feed([token]) for token in _last(model)])
    if mx.isnan(truth).any().item():
        raise ModelFault(
            f"the logits of this {model.model_type} model are NaN or infinite; download it again, or choose another"
        )
    return truth.astype(mx.float32)


def _try_chain(model: LoadedModel, before: Before, truth: mx.array, own_caches: bool) -> None:
    """Feeds token by token, then a chain that is rolled back after its first token.

    Raises:
        ModelFault: the logits differ from the `truth`.
    """

    def compare(start: int, logits: mx.array, tokens: str) -> None:
        own = truth[start : start + logits.shape[0]]
        worst = float(deviations(own, logits).max())
        if not worst <= (_TRUE if logits.dtype == mx.float32 else _ROUGH):
            past = " past its window" if before else ""
            raise ModelFault(f"the logits of {tokens}{past} are wrong by {worst:.1g} of their standard deviation")

    last = _last(model)
    if not own_caches:
        text = _Text(model, before, own_caches)
        compare(0, mx.concatenate([text.feed([token]) for token in last]), "one token at a time")
    text = _Text(model, before, own_caches)
    base = text.sequence.length
    text.sequence.mark()
    wrong = [(token + 1) % model.vocab_size for token in last[1 : 1 + _WRONG]]
    compare(0, text.feed([last[0], *wrong])[:1], "several tokens at once")
    text.sequence.roll_back(base + 1)
    done = text.sequence.length - base
    compare(done, text.feed(last[done:]), "tokens after a rejected chain")


def _befores(model: LoadedModel) -> list[Before]:
    """Returns that of a text's start, and of one past the model's windows if it has any."""
    text = _Text(model, None, own_caches=True)
    window = max((getattr(leaf, name, 0) for leaf in text.leaves for name in _WINDOWS), default=0)
    fillable = all(isinstance(leaf, ArraysCache) or hasattr(leaf, "update_and_fetch") for leaf in text.leaves)
    if not window:
        return [[]]
    if window > (_LARGEST if fillable else _LARGEST_READ):
        log.info("a window of %d tokens is too long to be tried", window)
        return [[]]
    if not fillable:
        return [[], [7 * i % model.vocab_size for i in range(window + _PAST)]]
    text.feed(_tokens(model, _TEXT))
    return [[], [_made_up(leaf, i, window) if hasattr(leaf, "keys") else None for i, leaf in enumerate(text.leaves)]]


def _made_up(leaf: Any, seed: int, window: int) -> tuple[mx.array, mx.array]:
    """Returns random keys and values like those in the cache, for more tokens than a window has."""
    columns = window + _PAST
    parts = []
    for i, held in enumerate((leaf.keys, leaf.values)):
        drawn = mx.random.normal((*held.shape[:2], columns, held.shape[3]), key=mx.random.key(2 * seed + i))
        drawn *= mx.std(held[:, :, :_TEXT].astype(mx.float32))
        if i == 1:
            drawn *= mx.where(mx.arange(columns) < _PAST + _EDGE, _LOUD, 1.0)[:, None]
        parts.append(drawn.astype(held.dtype))
    return parts[0], parts[1]


class _Text:
    """A text with caches of its own, which begins with `_TEXT` tokens and `before`; None: it is empty."""

    def __init__(self, model: LoadedModel, before: Before | None, own_caches: bool) -> None:
        self._kv_cache = SeparateKVCache(model.model, own_caches)
        self.sequence = self._kv_cache.open()
        self.leaves = [leaf for cache in self.sequence.caches for leaf in leaves_of(cache)]
        if before is None:
            return
        pairs = [entry for entry in before if not isinstance(entry, int)]
        self.feed(_tokens(model, _TEXT) + [entry for entry in before if isinstance(entry, int)])
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


def _tokens(model: LoadedModel, count: int, number: int = 0, step: int = 7919) -> list[int]:
    """Returns the tokens of meaningless text number `number`."""
    return [(step * i + 104729 * number + 13) % model.vocab_size for i in range(count)]


def _last(model: LoadedModel) -> list[int]:
    return [(6007 * i + 5) % model.vocab_size for i in range(_STEPS)]


_PROMPT, _BRANCHES, _DEPTH = 9, 3, 2
_EXACT, _HALF, _ROUNDED = 3e-5, 0.03, 0.3  # allowed `deviations`: float32, lower precision, activations in 8 bits


def tree_agrees(model: LoadedModel, open_tree: Callable[[Sequence[int]], Tree], prompt: int = _PROMPT) -> bool:
    """Returns whether trees have the model's own logits up to rounding, alone and, after a commit, in shared forwards.

    `prompt`: the number of tokens that the shorter tree is opened with.
    """
    texts = [_tokens(model, prompt + 5 * number, number) for number in range(2)]
    trees, agrees = [open_tree(text) for text in texts], True
    drafted = iter(_tokens(model, 4 * _BRANCHES * _DEPTH, 2))
    for together in (False, True):
        known = [{tree.root: text} for tree, text in zip(trees, texts, strict=True)]
        tips = [[tree.root] * (_BRANCHES - number) for number, tree in enumerate(trees)]
        for _ in range(_DEPTH):
            feeds = [TreeFeed(above, list(islice(drafted, len(above)))) for above in tips]
            if together:
                tips = Tree.feed_together(trees, feeds)
            else:
                tips = [tree.feed(feed.parents, feed.tokens) for tree, feed in zip(trees, feeds, strict=True)]
            for by_node, feed, nodes in zip(known, feeds, tips, strict=True):
                fed = zip(nodes, feed.parents, feed.tokens, strict=True)
                by_node |= {node: [*by_node[parent], cast(int, token)] for node, parent, token in fed}
        for number, (tree, by_node) in enumerate(zip(trees, known, strict=True)):
            agrees = agrees and all(are_own(model, text, tree.scores(node)) for node, text in by_node.items())
            texts[number] = by_node[tips[number][1]]
            tree.commit([n for n, text in by_node.items() if text == texts[number][: len(text)] and n != tree.root])
    for tree in trees:
        tree.close()
    return agrees


def are_own(model: LoadedModel, text: Sequence[int], logits: mx.array) -> bool:
    """Returns whether logits [V] are those of a plain forward of `text`, up to rounding. Waits."""
    if model.cpu is not None:  # compared with the model itself at load
        own = mx.array(alone(model.cpu, np.array(text, np.int32), (len(text),))[-1])
    else:
        own = model.model(mx.array([list(text)]), cache=make_prompt_cache(model.model))[0, -1]
    allowed = _EXACT if own.dtype == mx.float32 else _HALF
    if model.cpu is not None and model.cpu.quantised:  # sums in another order change the rounding to 8 bits
        allowed = _ROUNDED
    return bool(deviations(own[None], logits[None])[0] <= allowed)


_BATCH_LENGTHS = (9, 3, 6)


def batch_agrees(model: LoadedModel) -> bool:
    """Returns whether texts that share forwards have the model's own logits, up to rounding.

    Tries a piece of a prompt, chains of different lengths, a rollback, and closing a text.
    """
    kv_cache = FlatKVCache(model.model)
    tokens = [_tokens(model, length + 4, n) for n, length in enumerate(_BATCH_LENGTHS)]
    places = [kv_cache.open() for _ in tokens]

    def feed(*parts: tuple[int, int, bool]) -> bool:
        """Feeds each text n up to `end`; returns whether all wanted logits are the model's own."""
        feeds = [Feed(places[n], tokens[n][places[n].length : end], 0 if cut else 1, cut) for n, end, cut in parts]
        logits = kv_cache.forward(feeds)
        read = [(n, end) for n, end, cut in parts if not cut]
        return all(are_own(model, tokens[n][:end], logits[i]) for i, (n, end) in enumerate(read))

    feed((0, 5, True))
    agrees = feed((1, 3, False), (0, 9, True)) and feed((0, 10, False), (1, 6, False), (2, 6, False))
    places[1].roll_back(4)
    kv_cache.close(places[0])
    agrees = agrees and feed((1, 5, False), (2, 9, False))
    kv_cache.close(places[1])
    kv_cache.close(places[2])
    return agrees


def fault(model: LoadedModel, what: str, agrees: Callable[[], bool]) -> str:
    """Runs the check `agrees` of the form `what`; returns why the form fails, or "": then its changes stay."""
    with ExitStack() as undo:
        undo.callback(_restorer(model.model))
        try:
            with named_errors(what, logging.INFO):
                if agrees():
                    undo.pop_all()
                    return ""
            reason = "its logits are wrong"
        except ModelError as error:
            reason = first_line(error)
    log.info("%s: not for a %s model: %s", what, model.model_type, reason)
    return reason


def _restorer(model: nn.Module) -> Callable[[], None]:
    """Returns a function that makes a model's modules, and the names in their Python modules, what they are now."""
    kinds = [(part, type(part)) for part in model.modules()]
    names = [vars(sys.modules[name]) for name in {kind.__module__ for _, kind in kinds} if name in sys.modules]
    parts: list[dict[str, Any]] = [*(part for part, _ in kinds), *names]
    before = [dict(part) for part in parts]

    def restore() -> None:
        for part, kind in kinds:
            part.__class__ = kind
        for now, then in zip(parts, before, strict=True):
            for name in then:
                if now.get(name) is not then[name]:
                    now[name] = then[name]

    return restore


_LONGER = 256


def open_kv_cache(model: LoadedModel) -> KVCache:
    """Opens an empty KV cache. Its form is found once for each model."""
    return _cache_form(model)()


@once
def _cache_form(model: LoadedModel) -> Callable[[], KVCache]:
    if model.cpu is not None:
        # `engine.ort` checked texts in one forward at load. If logits are rounded, branches differ from chains.
        trees = not model.cpu.quantised and not _tree_fault(model, "trees of drafts", JointKVRows)
        return partial(FlatKVCache, model.model, trees, model.cpu)
    found = abilities(model)
    plain = model.attention_only and found.chains and not found.own_caches
    kinds = MlxKVCache | RotatingKVCache
    if not plain or not all(isinstance(cache, kinds) for cache in make_prompt_cache(model.model)):
        return partial(SeparateKVCache, model.model, found.own_caches)
    if fault(model, "texts in one forward", partial(batch_agrees, model)):
        return partial(SeparateKVCache, model.model)
    return partial(FlatKVCache, model.model, not _tree_fault(model, "trees of drafts", JointKVRows))


def sequence_cost(kv_cache: KVCache) -> KvCost:
    """Returns the memory that a text takes. State that can't be shortened may grow with the text, which is tried."""
    sequence = kv_cache.open()
    kv_cache.forward([Feed(sequence, [0], 0, True)])
    short = kv_cache.save(sequence, 1)
    cost = short.cost
    if short.states:
        kv_cache.forward([Feed(sequence, [0] * _LONGER, 0, True)])
        grown = kv_cache.save(sequence, 1 + _LONGER).nbytes - short.nbytes
        cost = KvCost(max(short.nbytes - grown // _LONGER, 0), grown // _LONGER)
    kv_cache.close(sequence)
    return cost


Form = type[DenseKVRows]


def open_tree(
    model: LoadedModel,
    tokens: Sequence[int],
    params: SamplingParams,
    progress: ReadProgress = None,
    draws: Draws | None = None,
    reader: PromptReader | None = None,
    cache: PromptCache | None = None,
    constraint: Constraint | None = None,
) -> Tree:
    """Prefills `tokens` (at least one) and returns the tree whose root is the last of them.

    Args:
        progress: called as (tokens done, total) after each chunk of a long prompt; may raise to end the call.
        draws: draws nodes' continuations, for residual sampling; None: the best token continues.
        reader: reads prompts instead of the model, if that is faster.
        cache: tokens in it are not read again; the tree's text is saved there when the tree is closed.
        constraint: the text's grammar, if it has one.

    Raises:
        InvalidRequest: there are no tokens, or one is not in the vocabulary.
        ModelError: no form of tree reproduces this model's logits.
    """
    if not tokens:
        raise InvalidRequest("the prompt has no tokens; expected at least one")
    if not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise InvalidRequest(
            f"a prompt token is out of range; expected 0 to {model.vocab_size - 1} for the draft model"
        )
    sampler = Sampler(params, model.vocab_size, normalised=False, constraint=constraint)
    return Tree(open_kv_rows(model, reader), sampler, model.context_length, tokens, progress, draws, cache)


@once
def tree_form(model: LoadedModel) -> Form:
    """Returns the form of KV rows for trees of this model, found once for each model.

    Raises:
        CannotDraft: no form reproduces this model's logits.
    """
    forms: list[Form] = [JointKVRows, DenseKVRows, RecurrentKVRows] if model.attention_only else [RecurrentKVRows]
    reason = ""
    for form in forms:
        reason = _tree_fault(model, "a tree of it", form)
        if not reason:
            return form
    raise CannotDraft(f"a {model.model_type} model can't be a draft model ({reason}); choose another")


def _tree_fault(model: LoadedModel, what: str, form: Form) -> str:
    """Returns why trees of this form fail, or ""."""
    return fault(model, what, lambda: tree_agrees(model, partial(open_form, model, form)))


def open_form(model: LoadedModel, form: Form, tokens: Sequence[int]) -> Tree:
    """Opens a greedy tree of this form, whether or not it passes the checks."""
    sampler = Sampler(SamplingParams(), model.vocab_size, normalised=False)
    return Tree(form(model), sampler, model.context_length, tokens)


def open_kv_rows(model: LoadedModel, reader: PromptReader | None = None) -> KVRows:
    """Opens empty KV rows for one tree; see `open_tree` for `reader`. Raises ModelError as `tree_form` does."""
    kv_rows = tree_form(model)(model)
    if not kv_rows.whole:  # a recurrent state comes from the model alone
        kv_rows.reader = reader
    return kv_rows


def tree_cost(model: LoadedModel) -> KvCost:
    """Returns the memory that a tree of this model takes. Raises ModelError as `tree_form` does."""
    kv_rows = open_kv_rows(model)
    kv_rows.prefill([0], None, 1)
    return kv_rows.save(1).cost
