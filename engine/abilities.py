"""What a model can do as a target: tried at load, against its own caches fed one token at a time.

The simplest caches that say what the model says are taken: those that roll back at once, else the model's own, copied
to be rolled back, else the model's own without chains. Where layers see a window of the text all is tried past it too,
behind keys and values that are made up: to compute so many would take minutes. Knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from outrider.engine.cache import KVState, leaves_of
from outrider.engine.loading import LoadedModel
from outrider.protocol.errors import ModelFault, OutriderError, named_errors
from outrider.protocol.messages import Abilities

log = logging.getLogger(__name__)

_PROMPT, _STEPS, _WRONG = 9, 6, 3
_EXACT, _HALF = 1e-3, 0.3  # root mean square, of the logits' deviation or of 1 if that is more: float32, and less
_WINDOWS = ("max_size", "chunk_size", "window_size")  # what mlx-lm's caches call it
_PAST = 64  # tokens that no window reaches
_LARGEST = 4096  # past larger windows nothing is tried: the made-up text would take gigabytes
_LARGEST_READ = 512  # nor past this one where a cache can't be filled, and the text has to be read
_EDGE, _LOUD = 16, 30.0  # values up to so far into the window are so much larger: an error of one token shows

_known: WeakKeyDictionary[LoadedModel, Abilities] = WeakKeyDictionary()


def abilities(model: LoadedModel) -> Abilities:
    """What this model can do; found the first time it is asked, then remembered.

    Raises:
        ModelError: it can't even decode: its forward fails, or its logits are not numbers.
    """
    if model.cpu is not None:
        return Abilities()  # chains and rollbacks are part of its check at load
    if model not in _known:
        _known[model] = _find(model)
        mx.clear_cache()
    return _known[model]


def _find(model: LoadedModel) -> Abilities:
    with named_errors(f"a forward of this {model.model_type} model"):
        trials = _trials(model)
    faults = []
    for own_caches in (False, True):
        fault = _first_fault([partial(trial.run, own_caches) for trial in trials])
        if fault is None:
            return Abilities(own_caches=own_caches)
        log.info("a %s target can't verify (own caches: %s): %s", model.model_type, own_caches, fault)
        faults.append(fault)
    why = f"a {model.model_type} model can't verify several tokens at once ({faults[-1]}), so it decodes token by token"
    return Abilities(chains=False, own_caches=True, why=why)


def _first_fault(attempts: list[Callable[[], None]]) -> str | None:
    for attempt in attempts:
        try:
            with named_errors("trying it", logging.INFO):
                attempt()
        except OutriderError as error:
            return str(error)
    return None


@dataclass(frozen=True, slots=True)
class _Trial:
    """A text's last `_STEPS` tokens and the logits that the model itself gives them, [_STEPS, V].

    `before` stands between the text's `_PROMPT` first tokens and these: keys and values of each cache, or tokens.
    """

    model: LoadedModel
    before: list[tuple[mx.array, mx.array] | None] | list[int]
    truth: mx.array

    @classmethod
    def of(cls, model: LoadedModel, before: list[tuple[mx.array, mx.array] | None] | list[int]) -> _Trial:
        kv = _begun(model, before, own_caches=True)
        truth = mx.concatenate([_feed(model, kv, [token]) for token in _last(model)])
        if mx.isnan(truth).any().item():
            raise ModelFault(f"the logits of this {model.model_type} model are NaN or infinite; check its weights")
        return cls(model, before, truth)

    def run(self, own_caches: bool) -> None:
        """Token by token, then with a chain of which one token holds. Raises ModelFault where the logits differ."""
        model, last = self.model, _last(self.model)
        if not own_caches:
            kv = _begun(model, self.before, own_caches)
            self._compare(0, mx.concatenate([_feed(model, kv, [token]) for token in last]), "one token at a time")
        kv = _begun(model, self.before, own_caches)
        base = kv.length
        kv.mark()
        wrong = [(token + 1) % model.vocab_size for token in last[1 : 1 + _WRONG]]
        self._compare(0, _feed(model, kv, [last[0], *wrong])[:1], "several tokens at once")
        kv.roll_back(base + 1)
        done = kv.length - base
        self._compare(done, _feed(model, kv, last[done:]), "what follows a chain that did not hold")

    def _compare(self, start: int, logits: mx.array, what: str) -> None:
        truth = self.truth[start : start + logits.shape[0]].astype(mx.float32)
        allowed = _EXACT if logits.dtype == mx.float32 else _HALF
        finite = mx.isfinite(truth)  # some models rule tokens out
        truth = mx.where(finite, truth, 0)
        difference = mx.where(finite, logits.astype(mx.float32), 0) - truth
        deviation = mx.maximum(mx.std(truth, axis=-1), 1.0)
        worst = float((mx.sqrt(mx.mean(difference**2, axis=-1)) / deviation).max().item())  # type: ignore[arg-type]
        if not worst <= allowed:
            past = " past its window" if self.before else ""
            raise ModelFault(f"the logits of {what}{past} are not its own, by {worst:.1g} of their deviation")


def _trials(model: LoadedModel) -> list[_Trial]:
    """At a text's start, and past its windows if it has any."""
    trials = [_Trial.of(model, [])]
    kv = KVState(model.model, own_caches=True)
    leaves = [leaf for cache in kv.caches for leaf in leaves_of(cache)]
    window = max((getattr(leaf, name, 0) for leaf in leaves for name in _WINDOWS), default=0)
    if not window:
        return trials
    fillable = all(isinstance(leaf, ArraysCache) or hasattr(leaf, "update_and_fetch") for leaf in leaves)
    if window > (_LARGEST if fillable else _LARGEST_READ):
        log.info("a window of %d tokens is too long to test", window)
        return trials
    if not fillable:
        return [*trials, _Trial.of(model, [7 * i % model.vocab_size for i in range(window + _PAST)])]
    _feed(model, kv, _first(model))
    made_up = [_made_up(leaf, i, window) if hasattr(leaf, "keys") else None for i, leaf in enumerate(leaves)]
    return [*trials, _Trial.of(model, made_up)]


def _made_up(leaf: Any, seed: int, window: int) -> tuple[mx.array, mx.array]:
    """Keys and values like those that the cache holds, for more tokens than a window takes."""
    columns = window + _PAST
    parts = []
    for i, held in enumerate((leaf.keys, leaf.values)):
        drawn = mx.random.normal((*held.shape[:2], columns, held.shape[3]), key=mx.random.key(2 * seed + i))
        drawn *= mx.std(held[:, :, :_PROMPT].astype(mx.float32))
        if i == 1:
            drawn *= mx.where(mx.arange(columns) < _PAST + _EDGE, _LOUD, 1.0)[:, None]
        parts.append(drawn.astype(held.dtype))
    return parts[0], parts[1]


def _begun(model: LoadedModel, before: list[Any], own_caches: bool) -> KVState:
    kv = KVState(model.model, own_caches)
    read = before if before and isinstance(before[0], int) else []
    _feed(model, kv, _first(model) + read)
    if before and not read:
        leaves = [leaf for cache in kv.caches for leaf in leaves_of(cache)]
        for leaf, made_up in zip(leaves, before, strict=True):
            if made_up is not None:
                leaf.update_and_fetch(*made_up)
        kv.length += next(made_up[0].shape[2] for made_up in before if made_up is not None)
    return kv


def _feed(model: LoadedModel, kv: KVState, tokens: list[int]) -> mx.array:
    """The logits [N, V], evaluated."""
    logits: mx.array = model.model(mx.array([tokens]), cache=kv.caches)[0]
    kv.length += len(tokens)
    mx.eval(logits, kv.state)
    return logits


def _first(model: LoadedModel) -> list[int]:
    return [(7919 * i + 13) % model.vocab_size for i in range(_PROMPT)]


def _last(model: LoadedModel) -> list[int]:
    return [(6007 * i + 5) % model.vocab_size for i in range(_STEPS)]
