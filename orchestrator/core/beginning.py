"""A request's beginning: how its rounds will be made, who drafts for it, and what is to be told about that."""

from __future__ import annotations

from dataclasses import replace

from outrider.orchestrator.core.account import Account
from outrider.orchestrator.core.cache_room import CacheRoom
from outrider.orchestrator.core.dispatch import Workers
from outrider.orchestrator.core.learning.kinds import kind_of
from outrider.orchestrator.core.ngram import NgramIndex
from outrider.orchestrator.core.part import Part
from outrider.orchestrator.core.planner import Planner
from outrider.orchestrator.core.request import Request
from outrider.orchestrator.core.round_records import RoundRecords
from outrider.orchestrator.core.speculation_cache import SpeculationCache
from outrider.orchestrator.events import Admit


def begun(admit: Admit, workers: Workers, planner: Planner, room: CacheRoom, now_ns: int) -> Request:
    """The request as it stands before anybody was told of it; its n-grams are still to be read."""
    less = workers.notes() if admit.mode != "ar" else []
    if not workers.target_abilities.chains:
        admit = replace(admit, mode="ar")
    drafters = workers.drafters() if admit.takes_workers else set()
    tokens = [*admit.tokens, *admit.said]
    looks = kind_of(tokens, admit.sampling.grammar is not None, admit.code)
    text = planner.texts.begun(looks, admit.sampling.temp == 0)
    plan, notes = planner.first_plan(admit, len(drafters), text.kind)
    return Request(
        admit,
        plan,
        tokens=tokens,
        ngrams=NgramIndex(),
        text=text,
        drafters={name: Part() for name in sorted(drafters)},
        cache=SpeculationCache(room),
        heard_ns=now_ns,
        account=Account(admitted_ns=now_ns),
        records=RoundRecords(now_ns) if admit.rounds else None,
        takes_trees=planner.trees and workers.target_abilities.trees and not admit.sampling.is_residual,
        notes=[*less, *notes],
    )
