"""The form in which a model's texts and trees are held: the fastest one that passes the checks at load.

`open_kv_cache` opens a target's KV cache: texts share forwards (`batch_agrees`) and verify trees of drafts
(`drafts_agree`) where logits stay right. `open_tree` opens a drafter's token tree in the first form of `KVRows` that
reproduces the model's logits (`tree_agrees`, `agrees_batched`), or refuses. The checks compare with plain forwards
(`ReferenceLogits`). They catch models whose attention ignores the mask, the positions or the columns it is given, whose
attention is not mlx-lm's common one, or whose layers mix the tokens of a row in another way. `fault` runs a check and
removes what a failed form has put into the model.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache as MlxKVCache
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from outrider.engine.abilities import abilities
from outrider.engine.hidden_states import backbone_of, final_norm
from outrider.engine.kv_cache import Feed, FlatKVCache, KVCache, SeparateKVCache
from outrider.engine.kv_rows import DenseKVRows, JointKVRows, KVRows, OrtKVRows
from outrider.engine.kv_transfer import FillableKVRows, PromptReader
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.forward import OrtFlat, alone
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.recurrent_rows import RecurrentKVRows
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree, feed_together
from outrider.engine.tree_feed import TreeFeed
from outrider.grammar.constraint import Constraint
from outrider.protocol.errors import CannotDraft, InvalidRequest, ModelError, first_line, named_errors
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import KvCost
from outrider.protocol.trees import lines

_PROMPT, _BRANCHES, _DEPTH = 9, 3, 2
_EXACT, _HALF = 1e-4, 0.1  # of the logits' standard deviation, or of 1 if that is more
_ROUNDED = 0.3  # the same, root mean square, where activations are rounded to 8 bits


def tree_agrees(model: LoadedModel, open_tree: Callable[[Sequence[int]], Tree], prompt: int = _PROMPT) -> bool:
    """True if the tree's logits are the model's own, up to rounding, before a commit and after it.

    `prompt`: how many tokens it is opened with.
    """
    tokens = [(7919 * i + 13) % model.vocab_size for i in range(prompt + 4 * _BRANCHES * _DEPTH)]
    text, rest = tokens[:prompt], tokens[prompt:]
    tree, own = open_tree(text), ReferenceLogits(model)
    texts = {tree.root: text}
    worst = _distance(own, tree, texts)
    for _ in range(2):
        tips = [tree.root] * _BRANCHES
        for _ in range(_DEPTH):
            fed, rest = rest[:_BRANCHES], rest[_BRANCHES:]
            above, tips = tips, tree.feed(tips, fed)
            texts |= {tip: [*texts[up], token] for tip, up, token in zip(tips, above, fed, strict=True)}
        worst = max(worst, _distance(own, tree, texts))
        path = [node for node in texts if texts[node] == texts[tips[1]][: len(texts[node])] and node > tree.root]
        tree.commit(path)
        texts = {tree.root: texts[tips[1]]}
    tree.close()
    return worst <= 1.0


def _distance(own: ReferenceLogits, tree: Tree, texts: dict[int, list[int]]) -> float:
    """The largest difference between the tree's and the model's logits, in units of what is allowed."""
    return max((own.distance(text, tree.scores(node)) for node, text in texts.items()), default=0.0)


class ReferenceLogits:
    """The model's own logits, computed once for each text, because several forms are tried with the same texts."""

    def __init__(self, model: LoadedModel) -> None:
        self._model, self._cpu = model.model, model.cpu
        self._known: dict[tuple[int, ...], mx.array] = {}

    def distance(self, text: Sequence[int], found: mx.array) -> float:
        """How far logits [V] are from the model's own after `text`, in units of what rounding explains. Waits."""
        key = tuple(text)
        if key not in self._known:
            self._known[key] = self._of(text)
        own = self._known[key]
        allowed = _EXACT if own.dtype == mx.float32 else _HALF
        known = own != -mx.inf  # a draft may be able to say fewer tokens than there are
        own, found = mx.where(known, own.astype(mx.float32), 0.0), mx.where(known, found.astype(mx.float32), 0.0)
        if self._cpu is not None and self._cpu.quantised:  # other sums, and roundings to 8 bits fall another way
            off = mx.sqrt(mx.mean((found - own) ** 2)) / mx.maximum(mx.std(own), 1.0)
            return float(off.item()) / _ROUNDED  # type: ignore[arg-type]
        difference = mx.abs(found - own).max() / mx.maximum(mx.std(own), 1.0)
        return float(difference.item()) / allowed  # type: ignore[arg-type]

    def _of(self, text: Sequence[int]) -> mx.array:
        if self._cpu is not None:  # it was compared with the model itself when it was loaded
            return mx.array(alone(self._cpu, np.array(text, np.int32), (len(text),))[-1])
        own: mx.array = self._model(mx.array([list(text)]), cache=make_prompt_cache(self._model))[0, -1]
        return own


def agrees_batched(model: LoadedModel, open_tree: Callable[[Sequence[int]], Tree]) -> bool:
    """True if trees of unlike lengths that share a forward have the model's own logits, up to rounding."""
    texts = [[(7919 * i + 104729 * n + 13) % model.vocab_size for i in range(_PROMPT + 5 * n)] for n in range(2)]
    trees = [open_tree(text) for text in texts]
    fed = [[5 % model.vocab_size, 7 % model.vocab_size][: n + 1] for n in range(2)]
    nodes = feed_together(trees, [TreeFeed([tree.root] * len(new), new) for tree, new in zip(trees, fed, strict=True)])
    worst, own = 0.0, ReferenceLogits(model)
    for tree, text, new, grown in zip(trees, texts, fed, nodes, strict=True):
        worst = max(worst, _distance(own, tree, {node: [*text, t] for node, t in zip(grown, new, strict=True)}))
        tree.close()
    return worst <= 1.0


_BATCH_LENGTHS = (9, 3, 6)


def batch_agrees(model: LoadedModel, own: ReferenceLogits, cpu: OrtFlat | None = None) -> bool:
    """True if every text keeps its logits through a prompt's piece, ragged chains, a rollback and a closed text."""
    kv_cache = FlatKVCache(model.model, cpu=cpu)
    tokens = [[(7919 * i + 104729 * n + 13) % model.vocab_size for i in range(_BATCH_LENGTHS[n] + 4)] for n in range(3)]
    places = [kv_cache.open() for _ in tokens]

    def feed(*parts: tuple[int, int, bool]) -> bool:
        """Feeds text n up to `end`; True if all wanted logits are the model's own."""
        feeds = [Feed(places[n], tokens[n][places[n].length : end], 0 if cut else 1, cut) for n, end, cut in parts]
        logits = kv_cache.forward(feeds)
        read = [(n, end) for n, end, cut in parts if not cut]
        return all(own.distance(tokens[n][:end], logits[i]) <= 1.0 for i, (n, end) in enumerate(read))

    feed((0, 5, True))
    found = feed((1, 3, False), (0, 9, True)) and feed((0, 10, False), (1, 6, False), (2, 6, False))
    places[1].roll_back(4)
    kv_cache.close(places[0])
    found = found and feed((1, 5, False), (2, 9, False))
    kv_cache.close(places[1])
    kv_cache.close(places[2])
    return found


_PARENTS = (-1, 0, -1, 0, 2)  # two branches behind the text, the first one forked
_PATH = (0, 3)
_LENGTHS = (9, 4)


def drafts_agree(model: LoadedModel, own: ReferenceLogits, cpu: OrtFlat | None = None) -> bool:
    """True if every node's logits are the model's own behind its branch, before and after a branch is accepted.

    The tree forks at the text and further down. It is fed alone, then with another request.
    """
    kv_cache = FlatKVCache(model.model, cpu=cpu)
    trials = [_TreeTrial.of(model, kv_cache, number) for number in range(len(_LENGTHS))]
    first = trials[0]
    found = _drafts_agree(own, kv_cache, [first])
    first.place.keep(len(first.text), [len(first.text) + node for node in _PATH])
    first.text += [first.nodes[node] for node in _PATH]
    found = found and _drafts_agree(own, kv_cache, trials)
    for one in trials:
        kv_cache.close(one.place)
    return found


@dataclass(slots=True)
class _TreeTrial:
    """A text whose tokens have all been fed, and the tokens of a tree behind it."""

    place: Any
    text: list[int]
    nodes: tuple[int, ...] = field(default=())

    @classmethod
    def of(cls, model: LoadedModel, kv_cache: FlatKVCache, number: int) -> _TreeTrial:
        def made_up(count: int, step: int) -> list[int]:
            return [(step * i + 104729 * number + 13) % model.vocab_size for i in range(count)]

        trial = cls(kv_cache.open(), made_up(_LENGTHS[number], 7919), tuple(made_up(len(_PARENTS), 6007)))
        kv_cache.forward([Feed(trial.place, trial.text, 0, True)])
        mx.eval(kv_cache.state())
        return trial


def _drafts_agree(own: ReferenceLogits, kv_cache: FlatKVCache, trials: list[_TreeTrial]) -> bool:
    """Feeds each text its tree; True if all logits are the model's own. The columns stay."""
    count = len(_PARENTS)
    logits = kv_cache.forward([Feed(one.place, one.nodes, count, parents=_PARENTS) for one in trials])
    branches = [[*one.text, *down] for one in trials for down in lines(one.nodes, _PARENTS)]
    return all(own.distance(branch, logits[row]) <= 1.0 for row, branch in enumerate(branches))


log = logging.getLogger(__name__)


def fault(model: LoadedModel, what: str, agrees: Callable[[], bool]) -> str:
    """Why `what`, which `agrees` tries, does not work for this model; empty: it works, and what it installed stays."""
    with _restored(model.model) as keep:
        try:
            with named_errors(what, logging.INFO):
                if agrees():
                    keep()
                    return ""
            reason = "its logits differ"
        except ModelError as error:
            reason = first_line(error)
    log.info("%s: not for a %s model: %s", what, model.model_type, reason)
    return reason


@contextmanager
def _restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Restores a model's parts, and the names in their Python modules, unless the block calls what it is given."""
    parts = [(part, dict(part)) for part in model.modules()]
    names = [vars(sys.modules[name]) for name in {type(part).__module__ for part, _ in parts} if name in sys.modules]
    functions = [(known, dict(known)) for known in names]
    kept = False

    def keep() -> None:
        nonlocal kept
        kept = True

    try:
        yield keep
    finally:
        if not kept:
            for now, before in [*parts, *functions]:
                for name in before:
                    if now.get(name) is not before[name]:
                        now[name] = before[name]


_LONGER = 256


_cache_forms: WeakKeyDictionary[LoadedModel, Callable[[], KVCache]] = WeakKeyDictionary()


def open_kv_cache(model: LoadedModel) -> KVCache:
    """An empty KV cache. Its form is found the first time and then remembered."""
    if model not in _cache_forms:
        _cache_forms[model] = _find_cache_form(model)
    return _cache_forms[model]()


def _find_cache_form(model: LoadedModel) -> Callable[[], KVCache]:
    own = ReferenceLogits(model)
    if model.cpu is not None:
        # Texts together were checked at load (`engine.ort`). Where logits are rounded, branches differ from chains.
        cpu = OrtFlat(model.cpu, final_norm(backbone_of(model.model)[0]))
        trees = cpu.trees and not fault(model, "trees of drafts", lambda: drafts_agree(model, own, cpu))
        return partial(FlatKVCache, model.model, trees, cpu)
    able = abilities(model)
    plain = model.attention_only and able.chains and not able.own_caches
    kinds = MlxKVCache | RotatingKVCache
    if not plain or not all(isinstance(cache, kinds) for cache in make_prompt_cache(model.model)):
        return partial(SeparateKVCache, model.model, able.own_caches)
    if fault(model, "texts in one forward", lambda: batch_agrees(model, own)):
        return partial(SeparateKVCache, model.model)
    return partial(FlatKVCache, model.model, not fault(model, "trees of drafts", lambda: drafts_agree(model, own)))


def sequence_cost(kv_cache: KVCache) -> KvCost:
    """The memory that a text takes. State that can't be cut may grow with the text, too, which is tried."""
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


Form = type[OrtKVRows] | type[JointKVRows] | type[DenseKVRows] | type[RecurrentKVRows]

_tree_forms: WeakKeyDictionary[LoadedModel, Form] = WeakKeyDictionary()


def open_tree(
    model: LoadedModel,
    tokens: Sequence[int],
    params: SamplingParams,
    progress: Callable[[int, int], None] | None = None,
    draws: Draws | None = None,
    reader: PromptReader | None = None,
    cache: PromptCache | None = None,
    constraint: Constraint | None = None,
) -> Tree:
    """Prefills `tokens` (at least one) and returns the tree whose root is the last of them.

    Args:
        progress: called as (tokens done, tokens in all) after each chunk of a long prompt; may raise to end the call.
        draws: how nodes' own continuations are drawn, for residual sampling; None: they are the best.
        reader: reads prompts in the model's place where that is faster.
        cache: tokens that it has are not read; what the tree has read goes there when the tree is closed.
        constraint: what the text's grammar allows, if it has one.

    Raises:
        InvalidRequest: no tokens, or one the model does not have.
        ModelError: no form of tree reproduces this model's logits.
    """
    if not tokens:
        raise InvalidRequest("the prompt has no tokens; expected at least one")
    if not 0 <= min(tokens) <= max(tokens) < model.vocab_size:
        raise InvalidRequest(f"a prompt token is outside 0..{model.vocab_size - 1}, the draft's vocabulary")
    sampler = Sampler(params, model.vocab_size, normalised=False, constraint=constraint)
    return Tree(open_kv_rows(model, reader), sampler, model.context_length, tokens, progress, draws, cache)


def tree_form(model: LoadedModel) -> Form:
    """The form of KV rows for trees of this model, found the first time and then remembered.

    Raises:
        CannotDraft: no form reproduces this model's logits.
    """
    if model not in _tree_forms:
        forms: list[Form] = [JointKVRows, DenseKVRows, RecurrentKVRows] if model.attention_only else [RecurrentKVRows]
        if model.cpu is not None:
            forms.insert(0, OrtKVRows)
        _tree_forms[model] = _first_that_agrees(model, forms)
    return _tree_forms[model]


def open_form(model: LoadedModel, form: Form, tokens: Sequence[int]) -> Tree:
    """A greedy tree of this form, whether or not it is the model's own."""
    sampler = Sampler(SamplingParams(), model.vocab_size, normalised=False)
    return Tree(form(model), sampler, model.context_length, tokens)


def open_kv_rows(model: LoadedModel, reader: PromptReader | None = None) -> KVRows:
    """Empty KV rows for one tree; see `open_tree` for `reader`. Raises ModelError as `tree_form` does."""
    kv_rows: KVRows = tree_form(model)(model)
    if isinstance(kv_rows, FillableKVRows):  # a recurrent state comes from the model alone
        kv_rows.reader = reader
    return kv_rows


def tree_cost(model: LoadedModel) -> KvCost:
    """The memory that a tree of this model takes. Raises ModelError as `tree_form` does."""
    kv_rows = open_kv_rows(model)
    kv_rows.prefill([0], None, 1)
    return kv_rows.save(1).cost


def _first_that_agrees(model: LoadedModel, forms: Sequence[Form]) -> Form:
    reason = ""
    for form in forms:
        opened = partial(open_form, model, form)
        reason = fault(model, "a tree of it", partial(_agrees, model, opened))
        if not reason:
            return form
    raise CannotDraft(f"a {model.model_type} model can't be a draft model ({reason}); choose another")


def _agrees(model: LoadedModel, opened: Callable[[Sequence[int]], Tree]) -> bool:
    return tree_agrees(model, opened) and agrees_batched(model, opened)
