"""Parts of unmodified mlx-lm models: where they are, what passes through them, and logits only where they are read.

`HiddenStates` records the outputs of chosen layers, and what goes into and comes out of the final norm, during forwards
that ask for them. Layers are counted from 0. `HiddenStateReaders` lets several readers share one recording.
`FirstLayers` runs the model's own forward as far as a layer and ends it there. `backbone_of` and the functions behind
it find a model's layers, final norm, embedding and output layer. `LMHead` wraps the output layer, so that it computes
logits only of the rows that are wanted (`LogitsIndices`); by default of all. Knows rows of tokens; nothing of texts,
chains or who reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from outrider.engine.flat import Floats
from outrider.protocol.errors import ModelError

Tell = Callable[[Any, Any], None]


def listen(module: nn.Module, who: object, tell: Tell) -> None:
    """Calls `tell(input, output)` after each call of `module` from now on, in place of `who`'s callback before.

    The module stays what it was in all else.
    """
    kind = type(module)
    if not issubclass(kind, _Observed):
        module.__class__ = type(kind.__name__, (_Observed, kind), {"__module__": kind.__module__})
        module._callbacks = _Callbacks()
    module._callbacks.by[who] = tell


class _Callbacks:
    """The callbacks of a module. (A plain dict would become part of the module.)"""

    def __init__(self) -> None:
        self.by: dict[object, Tell] = {}


class _Observed:
    """Stands before a module's own class in the order of methods."""

    _callbacks: _Callbacks

    def __call__(self, *args: Any, **others: Any) -> Any:
        out = super().__call__(*args, **others)  # type: ignore[misc]
        for tell in self._callbacks.by.values():
            tell(next(iter((*args, *others.values()))), out)
        return out


_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "embedding_norm", "output_norm")
_EMBEDDINGS = ("embed_tokens", "wte", "tok_embeddings", "embeddings", "word_embeddings", "embed_in")


def backbone_of(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The module that holds the model's layers, wherever it is nested, and the layers."""
    first = next(iter(getattr(model, "layers", ())), None)
    for module in model.modules():
        for value in module.values():
            if isinstance(value, list) and any(layer is first for layer in value):
                return module, value
    raise ModelError("the model's layers are not in a list, so their outputs can't be read")


def final_norm(backbone: nn.Module) -> nn.Module:
    return _child(backbone, _NORMS, "final norm to tap")


def embedding(backbone: nn.Module) -> nn.Module:
    return _child(backbone, _EMBEDDINGS, "embedding to share")


def output_layer(model: nn.Module, backbone: nn.Module) -> Callable[[mx.array], mx.array]:
    """Computes logits of rows behind the final norm, in a model that does nothing else to them."""
    own = model.get("lm_head")
    if isinstance(own, nn.Module):
        return lambda rows: own(rows)  # a module would become part of the module that keeps it
    return lambda rows: embedding(backbone).as_linear(rows)


def _child(backbone: nn.Module, names: tuple[str, ...], what: str) -> nn.Module:
    for name in names:
        if isinstance(backbone.get(name), nn.Module):
            return backbone[name]
    raise ModelError(f"the model has no {what}; expected one of {', '.join(names)} beside its layers")


BEFORE_NORM, AFTER_NORM = "before", "after"
Takes = Callable[[mx.array], None]
"""Is called with the hidden states of a part's tokens, [N, W], lazy."""


@dataclass(frozen=True, slots=True)
class HiddenStatePoints:
    """Which rows are recorded, side by side in this order: layers' outputs, the final norm's input, its output."""

    layers: tuple[int, ...] = ()
    before_norm: bool = False
    after_norm: bool = False

    @property
    def count(self) -> int:
        return len(self.layers) + self.before_norm + self.after_norm

    @property
    def keys(self) -> tuple[object, ...]:
        """A key for each of them, in their order."""
        return (*self.layers, *[BEFORE_NORM] * self.before_norm, *[AFTER_NORM] * self.after_norm)


class HiddenStates:
    """Records rows of one model. `fuse` makes what readers get, [N, W], of recorded rows [N, points * D]."""

    def __init__(
        self, model: nn.Module, points: HiddenStatePoints, fuse: Callable[[mx.array], mx.array] | None = None
    ) -> None:
        """Raises ModelError: the model has no such layer, no norm behind them, or its layers give no row a token."""
        self._points, self._fuse = points, fuse
        self._seen: dict[object, mx.array] | None = None
        backbone, layers = backbone_of(model)
        for number in points.layers:
            if not 0 <= number < len(layers):
                raise ModelError(f"there is no layer {number}: the model has {len(layers)}, counted from 0")
            listen(layers[number], "taps", partial(self._record_layer, number))
        if points.before_norm or points.after_norm:
            listen(final_norm(backbone), "taps", self._record_norm)
        self._try(model)

    def forward(self, call: Callable[[], mx.array], parts: Sequence[tuple[int, Takes | None]]) -> mx.array:
        """Runs `call`, a forward over parts of so many tokens each; each `Takes` gets its part's hidden states."""
        if not any(takes for _, takes in parts):
            return call()
        with self._open() as seen:
            logits = call()
        flat = mx.concatenate([seen[key] for key in self._points.keys], axis=-1)[0]
        if not all(takes for _, takes in parts):
            flat = mx.take(flat, mx.array(_wanted(parts), mx.int32), axis=0)
        hidden, begin = flat if self._fuse is None else self._fuse(flat), 0
        for count, takes in parts:
            if takes is not None:
                takes(hidden[begin : begin + count])
                begin += count
        return logits

    @contextmanager
    def _open(self) -> Iterator[dict[object, mx.array]]:
        """Records meanwhile. Afterwards no reference is kept, so that buffers can be used again."""
        seen = self._seen = {}
        try:
            yield seen
        finally:
            self._seen = None

    @property
    def is_open(self) -> bool:
        """Whether the forward under way is to record anything."""
        return self._seen is not None

    def wants(self, key: object) -> bool:
        """Whether a forward that is not the model's own is to record what passes there."""
        return key in self._points.keys

    def on_hidden_states(self, key: object, rows: Floats) -> None:
        """Records rows [T, D] of such a forward's tokens."""
        if self._seen is not None and self.wants(key):
            self._seen[key] = mx.array(rows)[None]

    def _record(self, key: object, out: Any) -> None:
        if self._seen is not None:
            self._seen[key] = out[0] if isinstance(out, tuple) else out

    def _record_layer(self, number: int, _: Any, out: Any) -> None:
        self._record(number, out)

    def _record_norm(self, x: Any, out: Any) -> None:
        self._record(BEFORE_NORM, x)
        self._record(AFTER_NORM, out)

    def _try(self, model: nn.Module) -> None:
        """Builds a forward without evaluating it and checks the shapes."""
        with self._open() as seen:
            model(mx.array([[0, 0]]))
        shapes = {key: seen[key].shape if key in seen else None for key in self._points.keys}
        for key, shape in shapes.items():
            if shape is None or shape[:-1] != (1, 2):
                raise ModelError(f"the model gives no hidden row a token at {key!r} ({shape}); it can't be tapped")


def _wanted(parts: Sequence[tuple[int, Takes | None]]) -> list[int]:
    """The places in the flat row of the parts that are taken."""
    rows: list[int] = []
    begin = 0
    for count, takes in parts:
        rows += range(begin, begin + count) if takes is not None else ()
        begin += count
    return rows


class FirstLayers:
    """The first `count` layers of `model`."""

    def __init__(self, model: nn.Module, count: int) -> None:
        """Raises ModelError: the model has fewer layers."""
        _, layers = backbone_of(model)
        if not 0 < count <= len(layers):
            raise ModelError(f"the model has {len(layers)} layers, so none can be left after {count}")
        self._ends = False
        listen(layers[count - 1], self, self._end)

    def rows(self, call: Callable[[], Any]) -> mx.array:
        """The output of the last of them for what `call` feeds to the model, [1, T, D]. Lazy.

        Of the caches only those of these layers are written.
        """
        self._ends = True
        try:
            call()
        except _End as end:
            return end.rows
        finally:
            self._ends = False
        raise ModelError("the model's forward never came to the layer that was to end it")

    def _end(self, _: Any, out: Any) -> None:
        if self._ends:
            raise _End(out[0] if isinstance(out, tuple) else out)


class _End(Exception):  # no error: the layer has been reached
    def __init__(self, rows: mx.array) -> None:
        super().__init__()
        self.rows = rows


@dataclass(frozen=True, slots=True)
class HiddenStateReader:
    """`fuse` makes what it reads, [N, W], of the rows that are recorded for it, [N, points * D]."""

    points: HiddenStatePoints
    fuse: Callable[[mx.array], mx.array]


class HiddenStateReaders:
    """Readers of one `HiddenStates`, whose `points` and `fuse` are these; `apart` gives each reader its own again."""

    def __init__(self, readers: Sequence[HiddenStateReader]) -> None:
        """One reader at least."""
        self._readers = tuple(readers)
        self._parts: list[tuple[int, mx.Dtype]] = []
        points = [reader.points for reader in readers]
        self.points = HiddenStatePoints(
            tuple(sorted({layer for one in points for layer in one.layers})),
            any(one.before_norm for one in points),
            any(one.after_norm for one in points),
        )

    def fuse(self, rows: mx.array) -> mx.array:
        """What all of them read, side by side."""
        columns = dict(zip(self.points.keys, mx.split(rows, self.points.count, axis=-1), strict=True))
        own = [
            reader.fuse(mx.concatenate([columns[key] for key in reader.points.keys], axis=-1))
            for reader in self._readers
        ]
        self._parts = [(part.shape[-1], part.dtype) for part in own]
        return own[0] if len(own) == 1 else mx.concatenate(own, axis=-1)

    def apart(self, features: mx.array) -> list[mx.array]:
        """Splits what `fuse` made: each reader's part, in order and in its own number format."""
        if len(self._parts) == 1:
            return [features]
        found, begin = [], 0
        for width, dtype in self._parts:
            found.append(features[:, begin : begin + width].astype(dtype))
            begin += width
        return found


class LogitsIndices:
    """The rows of the next forward that need logits, int [R]; None: all. `passed`: a head has used them."""

    def __init__(self) -> None:
        self.rows: mx.array | None = None
        self.passed = False

    def of(self, hidden: mx.array) -> mx.array:
        """The wanted ones of hidden rows [1, T, D]."""
        if self.rows is None:
            return hidden
        self.passed = True
        return mx.take(hidden, self.rows, axis=1)


class ReducedLMHead(nn.Module):  # type: ignore[misc]
    """An output layer for some of the vocabulary's tokens, as FR-Spec's and EAGLE-3's: the others' logits are -inf.

    `rows` is the layer, [hidden] -> [its tokens]; `tokens` are their ids, ascending.
    """

    def __init__(self, hidden: int, count: int, vocab_size: int) -> None:
        super().__init__()
        self.rows = nn.Linear(hidden, count, bias=False)
        self.tokens = mx.arange(count, dtype=mx.int32)
        self.vocab_size = vocab_size
        self.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return self.spread(self.rows(x))

    def spread(self, logits: mx.array) -> mx.array:
        """[..., V] of the rows' own [..., V_d]."""
        whole = mx.full((*logits.shape[:-1], self.vocab_size), -mx.inf, logits.dtype)
        whole[..., self.tokens] = logits
        return whole


class LMHead(nn.Module):  # type: ignore[misc]
    """An output layer that computes only the wanted logits."""

    def __init__(self, inner: nn.Module, wanted: LogitsIndices) -> None:
        super().__init__()
        self.inner = inner
        self._wanted = wanted

    def __getattr__(self, name: str) -> Any:
        """Models may read their layer's own attributes, such as its weights."""
        inner = self.get("inner")
        if inner is None or name == "inner":
            return super().__getattr__(name)
        return getattr(inner, name)

    def __call__(self, x: mx.array) -> mx.array:
        is_output = isinstance(self.inner, nn.Linear | nn.QuantizedLinear | ReducedLMHead)
        found: mx.array = self.inner(self._wanted.of(x) if is_output else x)
        return found

    def as_linear(self, x: mx.array) -> mx.array:
        """An embedding's second use, as the output layer."""
        found: mx.array = self.inner.as_linear(self._wanted.of(x))
        return found


def unwrapped(layer: nn.Module) -> nn.Module:
    """The model's own layer, whether it was wrapped or not."""
    return layer.inner if isinstance(layer, LMHead) else layer


def install(model: nn.Module) -> LogitsIndices:
    """Wraps the output layer of `model`, once. The result says which rows it computes."""
    wanted = LogitsIndices()
    for parent in model.modules():
        for name in ("lm_head", "embed_tokens", "wte", "tok_embeddings"):
            inner = parent.get(name) if isinstance(parent, dict) else None
            if isinstance(inner, LMHead):
                inner._wanted = wanted
            elif isinstance(
                inner, nn.Linear | nn.QuantizedLinear | nn.Embedding | nn.QuantizedEmbedding | ReducedLMHead
            ):
                parent[name] = LMHead(inner, wanted)
    return wanted
