"""Early exit: drafts with the target's own first layers, its final norm and its output layer.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains models whose early rows predict tokens in this way. For other
models an *adapter*, a normed low-rank map that is added to the row, is trained with a frozen target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import msgspec

from outrider.drafters.heads.checkpoint import HeadCheckpoint, HeadTarget, Layer, find_target_mismatch
from outrider.drafters.heads.drafter import HeadDraft, HeadDrafter
from outrider.drafters.heads.head import PairHead
from outrider.drafters.heads.trees import HeadTree
from outrider.engine.cache import FlatSequence
from outrider.engine.hidden_states import (
    FirstLayers,
    HiddenStateReader,
    HiddenStates,
    find_backbone,
    find_final_norm,
)
from outrider.engine.kv_cache import CacheSlot, Feed, FlatKVCache
from outrider.engine.kv_rows import KVRows, NewRows
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel
from outrider.engine.sampling import Sampler
from outrider.protocol.errors import CannotDraft
from outrider.protocol.sampling import SamplingParams

_MAX_CHAIN_TOKENS = 8
_TRIAL_TOKENS = 64
MIN_AGREEMENT = 0.1  # a head of this target agrees far more often, an untrained one far less often
_MAX_TRIED_EXITS = 8  # numbers of layers; each needs the output layer over the whole trial text


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The config.json of an adapter, which reads the rows after the first `exit_layer` layers of a target of these
    sizes. `target`: the target's fingerprint, if known (`protocol.digest`).
    """

    exit_layer: int
    rank: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    rms_norm_eps: float = 1e-5
    target: str = ""


class ExitAdapter(nn.Module):  # type: ignore[misc]
    """Maps rows [.., H] of an early layer to rows for the final norm. Weights have the checkpoint's names."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.down = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.hidden_size, bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        cast_rows = rows.astype(self.down.weight.dtype)
        out: mx.array = rows + self.up(self.down(self.norm(cast_rows))).astype(rows.dtype)
        return out


class EarlyExit(PairHead):
    """A head whose vectors are the target's rows after its first `exit_layer` layers; it needs no features."""

    reach = 1
    points = ()
    layers: tuple[nn.Module, ...] = ()  # its keys and values are the target's

    def __init__(self, exit_layer: int, target: LoadedModel, adapter: ExitAdapter | None = None) -> None:
        super().__init__(HeadTarget.of(target))
        norm = find_final_norm(find_backbone(target.model)[0])
        self.exit_layer, self.adapter = exit_layer, adapter
        self._norm: Layer = lambda rows: norm(rows)  # a function, since a module would become part of this one

    def logits(self, hidden: mx.array) -> mx.array:
        adapted = self.adapter(hidden) if self.adapter is not None else hidden
        return self._output(self._norm(adapted)).astype(mx.float32)


def generate_trial_text(model: LoadedModel) -> list[int]:
    """Returns a text that the target generates."""
    slot = CacheSlot(model, open_kv_cache(model), [0], SamplingParams(temp=1.0, seed=1))
    for _ in range(_TRIAL_TOKENS):
        scores = slot.sampler.scores(slot.forward(slot.unfed), [len(slot.tokens)])
        slot.tokens += cast(list[int], scores.argmax(axis=-1).tolist())
    return slot.tokens


def read_rows(target: LoadedModel, text: Sequence[int], reader: HiddenStateReader) -> tuple[mx.array, mx.array]:
    """Returns the target's logits [T, V] of a text, and the rows [T, W] of this reader."""
    rows: list[mx.array] = []
    hidden_states = HiddenStates(target.model, reader)
    logits = hidden_states.forward(lambda: target.model(mx.array([text]))[0], [(len(text), rows.append)])
    return logits, rows[0]


def measure_agreements(target: LoadedModel, exits: Sequence[EarlyExit]) -> list[float]:
    """Returns how often each exit predicts a text of the target as the target does."""
    reader = HiddenStateReader([exit.exit_layer - 1 for exit in exits])
    logits, rows = read_rows(target, generate_trial_text(target), reader)
    predicted = [exit.logits(own) for exit, own in zip(exits, mx.split(rows, len(exits), axis=-1), strict=True)]
    truth = mx.argmax(logits, axis=-1)
    return [cast(float, (mx.argmax(own, axis=-1) == truth).mean().item()) for own in predicted]


def reproduces_logits(target: LoadedModel, last: EarlyExit) -> bool:
    """Whether norm and output layer, applied to the rows after all layers, give the model's own logits."""
    logits, rows = read_rows(target, list(range(8)), HiddenStateReader([last.exit_layer - 1]))
    truth = logits.astype(mx.float32)
    apart = mx.abs(last.logits(rows) - truth).max()
    return bool((apart <= 1e-2 * mx.abs(truth).max()).item())


def best_speedup(agreement: float, share: float) -> float:
    """Returns the best speedup over all chain lengths, if a draft step takes `share` of a verify."""
    depths = range(1, _MAX_CHAIN_TOKENS + 1)
    return max(sum(agreement**k for k in range(depth + 1)) / (1 + depth * share) for depth in depths)


class ExitKVRows(KVRows):
    """Columns after the fed tokens of a target's text, by its first layers only; the verify overwrites them."""

    def __init__(self, drafter: ExitDrafter, sequence: FlatSequence) -> None:
        self._drafter, self._sequence = drafter, sequence

    @staticmethod
    def forward(texts: Sequence[ExitKVRows], new: Sequence[NewRows]) -> mx.array:
        drafter, fed = texts[0]._drafter, [text._sequence.length for text in texts]
        feeds = [Feed(text._sequence, rows.tokens, len(rows.parents)) for text, rows in zip(texts, new, strict=True)]
        try:
            for text, rows in zip(texts, new, strict=True):
                text._sequence.length = rows.start
            kv_cache = cast(FlatKVCache, texts[0]._sequence.rows)  # the target's, as `load` has checked
            return drafter.head.logits(kv_cache.first(drafter.layers, feeds))
        finally:
            for text, length in zip(texts, fed, strict=True):
                text._sequence.length = length


class ExitDraft(HeadDraft):
    """A text of the target, fed except for its last token; it needs no features."""

    def __init__(self, drafter: ExitDrafter, sampler: Sampler, sequence: FlatSequence) -> None:
        super().__init__(drafter, sampler)
        self._sequence = sequence
        self._tree = HeadTree(ExitKVRows(drafter, sequence), sampler, drafter.head.context_length)

    @property
    def is_up_to_date(self) -> bool:
        return self._sequence.length == self._length - 1


class ExitDrafter(HeadDrafter):
    """A `HeadDrafter` that drafts in the target's KV cache."""

    def __init__(self, exit: EarlyExit, target: LoadedModel) -> None:
        self.layers = FirstLayers(target.model, exit.exit_layer)
        super().__init__(exit, target.vocab_size)


def load(folder: Path, target: LoadedModel) -> ExitDrafter:
    """Returns a drafter by the target's first layers: the best number of them, or that of the adapter in `folder`.

    Raises:
        CannotDraft: there is no adapter, it is for another target, or this target's rows can't be read early.
    """
    if not isinstance(open_kv_cache(target), FlatKVCache):
        raise CannotDraft(f"a {target.model_type} model can't batch requests, which early exit needs")
    count = len(find_backbone(target.model)[1])
    if not reproduces_logits(target, EarlyExit(count, target)):
        raise CannotDraft(
            f"a {target.model_type} model has more after its layers than a norm and an output layer, so early exit is"
            " not supported"
        )
    if target.folder is not None and folder.samefile(target.folder):
        exits, kind = [EarlyExit(n, target) for n in range(1, count, -(-count // _MAX_TRIED_EXITS))], ""
    else:
        exits, kind = [_read_adapted_exit(folder, target)], " and an adapter"
    if not exits:
        raise CannotDraft(f"the target has {count} layer, so early exit is not possible")
    tried = zip(exits, measure_agreements(target, exits), strict=True)
    best, agreement = max(tried, key=lambda pair: best_speedup(pair[1], pair[0].exit_layer / count))
    mismatch = find_target_mismatch(folder, target.folder)
    if mismatch and agreement < MIN_AGREEMENT:
        raise CannotDraft(
            f"{folder}: {mismatch}, and never agrees with this one; expected an adapter trained for this target"
        )
    notes = [f"{agreement:.0%} of a trial text's tokens agree", mismatch]
    if best_speedup(agreement, best.exit_layer / count) < 1:
        notes.append(
            "few drafts will be accepted; use a model trained for early exit (LayerSkip), or an adapter for it"
        )
    drafter = ExitDrafter(best, target)
    drafter.note = (
        f"drafting with the first {best.exit_layer} of {count} layers{kind}: {'; '.join(filter(None, notes))}"
    )
    drafter.agreement, drafter.is_weak = agreement, any(notes[1:])
    return drafter


def _read_adapted_exit(folder: Path, target: LoadedModel) -> EarlyExit:
    checkpoint = HeadCheckpoint.read(folder, HeadTarget.of(target))
    with checkpoint.config_errors("early-exit"):
        settings = msgspec.convert(checkpoint.config, AdapterConfig, strict=False)
        layers = settings.num_hidden_layers
        checkpoint.check_target(hidden_size=settings.hidden_size, num_hidden_layers=layers)
        checkpoint.check_target(vocab_size=settings.vocab_size)
        if not 0 < settings.exit_layer < layers:
            raise CannotDraft(
                f"{checkpoint.name} exits after {settings.exit_layer} layers of {layers}; expected 1 to {layers - 1}"
            )
        adapter = ExitAdapter(settings)
        checkpoint.load_into(adapter)
    return EarlyExit(settings.exit_layer, target, adapter)
