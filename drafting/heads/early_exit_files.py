"""Makes a target's early exit: of its layers alone, or with an adapter that was trained for it and lies in a folder.

Every reason why there is none is one sentence.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.drafting.heads.checkpoint import complete, fill, read_config, read_weights, refuse_quantised, stranger
from outrider.drafting.heads.early_exit import AdapterConfig, EarlyExit, ExitAdapter
from outrider.drafting.heads.exit_drafter import ExitDrafter
from outrider.drafting.heads.exit_trial import agreements, reproduces, speedup
from outrider.engine.loading import LoadedModel
from outrider.engine.open_texts import open_texts
from outrider.engine.parts import backbone_of, final_norm, output_layer
from outrider.engine.texts import FlatTexts
from outrider.protocol.errors import CannotDraft
from outrider.protocol.heads import head_kind

log = logging.getLogger(__name__)

_LEAST = 0.1
_MOST_TRIED = 8  # numbers of layers: each takes a pass of the output layer over the trial's text


def load(folder: Path, target: LoadedModel) -> ExitDrafter:
    """Drafts by the target's first layers, as many as seem best, or as the adapter in `folder` was trained for.

    Raises:
        CannotDraft: there is no adapter, it is for another target, or this one's rows can't be read early.
    """
    if not isinstance(open_texts(target), FlatTexts):
        raise CannotDraft(f"a {target.model_type} model can't batch requests, which early exit needs")
    _, layers = backbone_of(target.model)
    count = len(layers)
    if not reproduces(target, _exit(target, count)):
        raise CannotDraft(
            f"a {target.model_type} model does more after its layers than norm and output layer, so"
            " early exit is not supported"
        )
    if target.folder is not None and folder.samefile(target.folder):
        return _best(target, count)
    return _adapted(folder, target, count)


def _exit(target: LoadedModel, layers: int, adapter: ExitAdapter | None = None) -> EarlyExit:
    backbone, _ = backbone_of(target.model)
    output = output_layer(getattr(target.model, "language_model", target.model), backbone)
    norm = final_norm(backbone)
    return EarlyExit(layers, lambda rows: norm(rows), output, target.context_length, adapter)


def _best(target: LoadedModel, count: int) -> ExitDrafter:
    tried = range(1, count, -(-count // _MOST_TRIED))
    found = agreements(target, (_exit(target, layers) for layers in tried))
    if not found:
        raise CannotDraft(f"the target has {count} layer, so early exit is not possible")
    gains = {layers: speedup(agreement, layers / count) for layers, agreement in found.items()}
    layers = max(gains, key=gains.__getitem__)
    note = f"drafting by the first {layers} of {count} layers, which agree with all in {found[layers]:.0%} of a trial"
    if gains[layers] < 1:
        note += ": few drafts will be accepted; use a model trained for early exit (LayerSkip), or an adapter"
        log.warning("%s", note)
    return ExitDrafter(_exit(target, layers), target, note, found[layers])


def _adapted(folder: Path, target: LoadedModel, count: int) -> ExitDrafter:
    name, config, weights = str(folder), read_config(folder), read_weights(folder)
    if head_kind(config) != "early-exit":
        raise CannotDraft(f"{name} is not an early-exit adapter; expected one, or no draft model")
    refuse_quantised(config, weights, name)
    settings = _settings(config, name)
    _check(settings, target, count, name)
    adapter = ExitAdapter(settings)
    fill(adapter, weights, name)
    exit = _exit(target, settings.exit_layer, adapter)
    (agreement,) = agreements(target, [exit]).values()
    other = stranger(folder, target.folder)
    if other and agreement < _LEAST:
        raise CannotDraft(
            f"{name}: {other}, and never agrees with this one; expected an adapter trained for this target"
        )
    note = f"drafting by {exit.layers} of {count} layers and an adapter, which agree in {agreement:.0%} of a trial"
    if other:
        note += f"; {other}"
    if agreement < _LEAST:
        note += ": few drafts will be accepted; use an adapter trained for this target"
    return ExitDrafter(exit, target, note, agreement)


def _settings(config: Mapping[str, Any], name: str) -> AdapterConfig:
    with complete(name, "an adapter's sizes"):
        return AdapterConfig(
            exit_layer=int(config["exit_layer"]),
            rank=int(config["rank"]),
            hidden_size=int(config["hidden_size"]),
            vocab_size=int(config["vocab_size"]),
            num_hidden_layers=int(config["num_hidden_layers"]),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
            target=str(config.get("target", "")),
        )


def _check(settings: AdapterConfig, target: LoadedModel, count: int, name: str) -> None:
    """Raises CannotDraft: it is for another target."""
    config = target.config.get("text_config") or target.config
    its = (settings.hidden_size, settings.num_hidden_layers, settings.vocab_size)
    have = (int(config["hidden_size"]), count, int(config["vocab_size"]))
    if its != have:
        raise CannotDraft(
            f"{name} is for a target with a width of {its[0]}, {its[1]} layers and {its[2]} tokens, and this one has"
            f" {have[0]}, {have[1]} and {have[2]}; expected one that was trained for it"
        )
    if not 0 < settings.exit_layer < count:
        raise CannotDraft(f"{name} leaves after {settings.exit_layer} layers of {count}; expected 1 to {count - 1}")
