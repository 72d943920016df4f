"""Loads the drafters of the target's process. One that can't be used is left out, with a sentence, and ends nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from outrider.drafting.heads import load as heads
from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.step_cost import step_cost
from outrider.drafting.mlx import MlxDrafter
from outrider.engine.loading import LoadedModel
from outrider.protocol import abilities
from outrider.protocol.errors import OutriderError
from outrider.protocol.guard import named_errors
from outrider.protocol.heads import DRAFT_MODEL
from outrider.target_worker.colocated import Colocated
from outrider.target_worker.own_drafters import OwnDrafter
from outrider.target_worker.own_head import ColocatedHead, beside_target

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A drafter to have: its `name`, its `kind`, which is of `protocol.heads.HEADS` or a model's, and its files."""

    name: str
    kind: str
    path: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The drafters that are there, by name, and a sentence for each that is not."""

    drafters: Mapping[str, OwnDrafter]
    told: tuple[abilities.OwnDrafter, ...] = ()
    left_out: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


Cost = Callable[[HeadDrafter, LoadedModel], float | None]


def load(
    wanted: Sequence[Wanted],
    model: LoadedModel,
    progress: Callable[[str], None],
    alone: bool,
    cost: Cost | None = step_cost,
) -> Loaded:
    """`alone`: the model is whole in this process, see `drafting.heads.load`; a head's `cost` is then tried, if given:
    on a machine that stands in for another it says nothing."""
    found: dict[str, OwnDrafter] = {}
    told, left_out, doubts = [], [], []
    for one in wanted:
        try:
            drafter = _loaded(one, model, progress, alone)
        except OutriderError as error:
            left_out.append(f"drafter {one.name} is not used: {error}")
            continue
        found[one.name] = drafter
        doubts += [drafter.drafter.note] if drafter.drafter.note else []
        told.append(_told(one, drafter, model, cost if alone else None))
    return Loaded(found, tuple(told), tuple(left_out), tuple(doubts))


def _loaded(wanted: Wanted, model: LoadedModel, progress: Callable[[str], None], alone: bool) -> OwnDrafter:
    if wanted.kind == DRAFT_MODEL:
        return Colocated(MlxDrafter.load(wanted.path, progress))
    return beside_target(heads.load(wanted.kind, wanted.path, model, progress, alone))


def _told(wanted: Wanted, drafter: OwnDrafter, model: LoadedModel, cost: Cost | None) -> abilities.OwnDrafter:
    is_head = not isinstance(drafter, Colocated)
    agreement = None if isinstance(drafter, Colocated) else drafter.drafter.agreement
    return abilities.OwnDrafter(
        wanted.name,
        wanted.path,
        is_head,
        -1.0 if agreement is None else agreement,
        _weight(drafter, model, cost),
    )


def _weight(drafter: OwnDrafter, model: LoadedModel, cost: Cost | None) -> float:
    tried = None
    if cost is not None and isinstance(drafter, ColocatedHead):
        try:
            with named_errors("measuring the head"):
                tried = cost(drafter.drafter, model)
        except OutriderError as error:
            log.warning("%s; its weights tell", error)
    return drafter.drafter.weight_bytes / max(model.weight_bytes, 1) if tried is None else tried
