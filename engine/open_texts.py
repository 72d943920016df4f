"""The way in which a model's texts are held: together, and with trees, where self-checks show that all stays right."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from outrider.engine import batchcheck, treecheck, trial
from outrider.engine.abilities import abilities
from outrider.engine.loading import LoadedModel
from outrider.engine.ort.flat import OrtFlat
from outrider.engine.parts import backbone_of, final_norm
from outrider.engine.selfcheck import Own
from outrider.engine.texts import Feed, FlatTexts, SeparateTexts, Texts
from outrider.protocol.kv import KvCost

_LONGER = 256


@dataclass(frozen=True, slots=True)
class _Way:
    """What a model's texts may be. `together`: they share forwards; else `own_caches` says whose caches they have."""

    together: bool = False
    trees: bool = False
    cpu: OrtFlat | None = None
    own_caches: bool = False


_known: WeakKeyDictionary[LoadedModel, _Way] = WeakKeyDictionary()


def open_texts(model: LoadedModel) -> Texts:
    """No texts yet, for a target that serves several. Their way is found the first time, then remembered."""
    if model not in _known:
        _known[model] = _find(model)
    way = _known[model]
    if way.together:
        return FlatTexts(model.model, way.trees, way.cpu)
    return SeparateTexts(model.model, way.own_caches)


def _find(model: LoadedModel) -> _Way:
    if model.cpu is not None:
        return _on_cpu(model, OrtFlat(model.cpu, final_norm(backbone_of(model.model)[0])))
    able = abilities(model)
    plain = model.attention_only and able.chains and not able.own_caches
    if not plain or not all(isinstance(cache, KVCache | RotatingKVCache) for cache in make_prompt_cache(model.model)):
        return _Way(own_caches=able.own_caches)
    own = Own(model)
    if trial.fault(model, "texts in one forward", lambda: batchcheck.agrees(model, own)):
        return _Way()
    return _Way(True, not trial.fault(model, "trees of drafts", lambda: treecheck.agrees(model, own)))


def _on_cpu(model: LoadedModel, cpu: OrtFlat) -> _Way:
    """Its check at load has fed texts together already; where logits are rounded no side branch is a chain's equal."""
    own = Own(model)
    trees = cpu.trees and not trial.fault(model, "trees of drafts", lambda: treecheck.agrees(model, own, cpu))
    return _Way(True, trees, cpu)


def text_cost(texts: Texts) -> KvCost:
    """What a text takes in memory. State that can't be cut may grow with the text, too: that is tried."""
    text = texts.open()
    texts.forward([Feed(text, [0], 0, True)])
    short = texts.save(text, 1)
    cost = short.cost
    if short.states:
        texts.forward([Feed(text, [0] * _LONGER, 0, True)])
        grown = texts.save(text, 1 + _LONGER).nbytes - short.nbytes
        cost = KvCost(max(short.nbytes - grown // _LONGER, 0), grown // _LONGER)
    texts.close(text)
    return cost
