"""Finds parts of unmodified mlx-lm models, records their hidden states, and computes only the wanted logits.

Layers are counted from 0. Knows rows of tokens; knows nothing of texts, chains or readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from outrider.protocol.errors import ModelError

ForwardHook = Callable[[Any, Any], None]
_FINAL_NORM_NAMES = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm", "output_norm")
_EMBEDDING_NAMES = ("embed_tokens", "wte", "tok_embeddings", "embeddings", "word_embeddings", "embed_in")
Point = int | str
"""Where rows are recorded: after a layer, given by its number, or `BEFORE_NORM` or `AFTER_NORM`, the final one."""
BEFORE_NORM, AFTER_NORM = "before", "after"
HiddenStatesCallback = Callable[..., None]
"""A callback that receives the hidden states of a part's tokens, [N, W] for each reader, lazy."""

_OUTPUT_LAYER_NAMES = ("lm_head", "embed_tokens", "wte", "tok_embeddings")


def add_mixin(module: nn.Module, base: type, **state: object) -> None:
    """Puts `base` before the class of `module` in its method resolution order, once, with `state` as attributes.

    Everything else about the module stays the same.
    """
    kind = type(module)
    if not issubclass(kind, base):
        module.__class__ = type(kind.__name__, (base, kind), {"__module__": kind.__module__, **state})


def register_forward_hook(module: nn.Module, owner: object, callback: ForwardHook) -> None:
    """Calls `callback(input, output)` after each call of `module`; replaces the owner's earlier callback."""
    add_mixin(module, _HookedModule, _callbacks={})
    module._callbacks[owner] = callback


class _HookedModule:
    _callbacks: dict[object, ForwardHook]

    def __call__(self, *args: Any, **others: Any) -> Any:
        out = super().__call__(*args, **others)  # type: ignore[misc]
        for callback in self._callbacks.values():
            callback(next(iter((*args, *others.values()))), out)
        return out


def find_backbone(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the module that holds the model's layers, wherever it is nested, and the layers."""
    first = next(iter(getattr(model, "layers", ())), None)
    for module in model.modules():
        for value in module.values():
            if isinstance(value, list) and any(layer is first for layer in value):
                return module, value
    raise ModelError("the model's layers are not in a list, so their outputs can't be read")


def find_final_norm(backbone: nn.Module) -> nn.Module:
    return _find_child(backbone, _FINAL_NORM_NAMES, "final norm")


def find_embedding(backbone: nn.Module) -> nn.Module:
    return _find_child(backbone, _EMBEDDING_NAMES, "embedding")


def find_lm_head(model: nn.Module) -> nn.Module | None:
    """Returns the model's output layer, wherever it is nested; None: its embedding computes the logits."""
    layers = (module.get("lm_head") for module in model.modules() if isinstance(module, dict))
    return next((layer for layer in layers if isinstance(layer, nn.Module)), None)


def find_output_layer(model: nn.Module, backbone: nn.Module) -> Callable[[mx.array], mx.array]:
    """Returns a function that computes logits of rows after the final norm, for models that do nothing else there."""
    if (own := find_lm_head(model)) is not None:
        return lambda rows: own(rows)  # a function, since a module would become part of the module that holds it
    return lambda rows: find_embedding(backbone).as_linear(rows)


def _find_child(backbone: nn.Module, names: tuple[str, ...], part: str) -> nn.Module:
    for name in names:
        if isinstance(backbone.get(name), nn.Module):
            return backbone[name]
    raise ModelError(f"the model's {part} can't be found; expected one of {', '.join(names)} next to its layers")


@dataclass(frozen=True, slots=True)
class HiddenStateReader:
    """Reads the rows of its `points`, concatenated; `fuse`, if any, converts them [N, points * D] to those that it
    uses, [N, W]."""

    points: Sequence[Point]
    fuse: Callable[[mx.array], mx.array] | None = None


class HiddenStates:
    """Records rows of one model during forwards that request them, for these `readers`."""

    def __init__(self, model: nn.Module, *readers: HiddenStateReader) -> None:
        """Raises ModelError if the model lacks a layer or the final norm, or a layer doesn't return a row per token."""
        self._readers = readers
        self._points = {point for reader in readers for point in reader.points}
        self._seen: dict[Point, mx.array] | None = None
        backbone, layers = find_backbone(model)
        self._norm: nn.Module | None = None
        self._last = len(layers) - 1
        self._layers = sorted(point for point in self._points if isinstance(point, int))
        for number in self._layers:
            if not 0 <= number < len(layers):
                raise ModelError(f"there is no layer {number}; expected 0 to {len(layers) - 1}")
            register_forward_hook(layers[number], "taps", partial(self._record, number))
        if self._points & {BEFORE_NORM, AFTER_NORM}:
            self._norm = find_final_norm(backbone)
            register_forward_hook(self._norm, "taps", self._record_norm)
        self._check_shapes(model)

    def forward(
        self, call: Callable[[], mx.array], parts: Sequence[tuple[int, HiddenStatesCallback | None]]
    ) -> mx.array:
        """Runs `call`, a forward over parts with these token counts; passes their hidden states to the callbacks."""
        if not any(callback for _, callback in parts):
            return call()
        with self._open() as seen:
            logits = call()
        flat = [mx.concatenate([seen[point] for point in reader.points], axis=-1)[0] for reader in self._readers]
        if not all(callback for _, callback in parts):
            has_callback = np.repeat([callback is not None for _, callback in parts], [count for count, _ in parts])
            taken = mx.array(np.flatnonzero(has_callback).astype(np.int32))
            flat = [mx.take(rows, taken, axis=0) for rows in flat]
        own = zip(self._readers, flat, strict=True)
        hidden, begin = [rows if reader.fuse is None else reader.fuse(rows) for reader, rows in own], 0
        for count, callback in parts:
            if callback is not None:
                callback(*(rows[begin : begin + count] for rows in hidden))
                begin += count
        return logits

    @contextmanager
    def _open(self) -> Iterator[dict[Point, mx.array]]:
        """Records during the block. Afterwards no reference is kept, so that buffers can be reused."""
        seen = self._seen = {}
        try:
            yield seen
        finally:
            self._seen = None

    @property
    def tapped_layers(self) -> list[int]:
        """The layers whose outputs a forward outside the model must pass to `record_layer_rows`."""
        if self._seen is None:
            return []
        return sorted({*self._layers, *([] if self._norm is None else [self._last])})

    def record_layer_rows(self, number: int, rows: np.ndarray[Any, Any]) -> None:
        """Records a layer's output [T, D] in a forward outside the model (see `tapped_layers`)."""
        out = mx.array(rows)[None]
        self._record(number, None, out)
        if number == self._last and self._norm is not None:
            self._norm(out)  # its callback records them, too

    def _record(self, point: Point, _: Any, out: Any) -> None:
        if self._seen is not None:
            self._seen[point] = out[0] if isinstance(out, tuple) else out

    def _record_norm(self, x: Any, out: Any) -> None:
        self._record(BEFORE_NORM, None, x)
        self._record(AFTER_NORM, None, out)

    def _check_shapes(self, model: nn.Module) -> None:
        """Builds a forward without evaluating it and checks the shapes."""
        with self._open() as seen:
            model(mx.array([[0, 0]]))
        for point in self._points:
            shape = seen[point].shape if point in seen else None
            if shape is None or shape[:-1] != (1, 2):
                raise ModelError(
                    f"the model's hidden states at {point!r} have the shape {shape}; expected (1, 2, D), a row per"
                    " token"
                )


class FirstLayers:
    """The model's own forward, which ends after its first `count` layers."""

    def __init__(self, model: nn.Module, count: int) -> None:
        _, layers = find_backbone(model)
        self._ends = False
        register_forward_hook(layers[count - 1], self, self._end)

    def rows(self, call: Callable[[], Any]) -> mx.array:
        """Returns the last layer's output for the tokens that `call` feeds to the model, [1, T, D]. Lazy.

        Only the caches of these layers are written.
        """
        self._ends = True
        try:
            call()
        except _StopForward as end:
            return end.rows
        finally:
            self._ends = False
        raise ModelError("the model's forward did not call the layer after which it should end; choose another model")

    def _end(self, _: Any, out: Any) -> None:
        if self._ends:
            raise _StopForward(out[0] if isinstance(out, tuple) else out)


class _StopForward(Exception):  # not an error: ends the forward after the layer
    def __init__(self, rows: mx.array) -> None:
        super().__init__()
        self.rows = rows


class LogitsIndices:
    """The rows of the next forward that need logits, int [R]; None: all. `passed`: an output layer has used them."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.passed = False

    def select(self, hidden: mx.array) -> mx.array:
        """Returns the wanted rows of hidden rows [1, T, D]."""
        if self.rows is None:
            return hidden
        self.passed = True
        return mx.take(hidden, self.rows, axis=1)


def scatter_logits(logits: mx.array, tokens: mx.array, vocab_size: int) -> mx.array:
    """Returns logits [..., V] from those of these tokens, [..., T]; -inf for all others."""
    scattered = mx.full((*logits.shape[:-1], vocab_size), -mx.inf, logits.dtype)
    scattered[..., tokens] = logits
    return scattered


class ReducedLMHead(nn.Module):  # type: ignore[misc]
    """An output layer for part of the vocabulary, as in FR-Spec and EAGLE-3; the other tokens' logits are -inf.

    `rows`: the layer, [hidden] -> [its tokens]; `tokens`: their ids, ascending.
    """

    def __init__(self, hidden: int, count: int, vocab_size: int) -> None:
        super().__init__()
        self.rows = nn.Linear(hidden, count, bias=False)
        self.tokens = mx.arange(count, dtype=mx.int32)
        self.vocab_size = vocab_size
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return scatter_logits(self.rows(x), self.tokens, self.vocab_size)


class LMHead:
    """A mixin (see `add_mixin`) for output layers, and embeddings used as such: computes only the wanted logits."""

    _indices: LogitsIndices

    def __call__(self, x: mx.array) -> Any:
        is_output = isinstance(self, nn.Linear | nn.QuantizedLinear | ReducedLMHead)
        return super().__call__(self._indices.select(x) if is_output else x)  # type: ignore[misc]

    def as_linear(self, x: mx.array) -> Any:
        """Computes logits with an embedding."""
        return super().as_linear(self._indices.select(x))  # type: ignore[misc]


_OUTPUT_LAYER_TYPES = nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding | ReducedLMHead


def install_lm_head(model: nn.Module) -> LogitsIndices:
    """Extends the output layer of `model`, once; returns the object that chooses the rows that it computes."""
    found = [module.get(name) for module in model.modules() if isinstance(module, dict) for name in _OUTPUT_LAYER_NAMES]
    indices = next((layer._indices for layer in found if isinstance(layer, LMHead)), LogitsIndices())
    for layer in found:
        if isinstance(layer, _OUTPUT_LAYER_TYPES):
            add_mixin(layer, LMHead, _indices=indices)
    return indices
