"""What drafting would cost in each place this machine has: milliseconds for one token, and for a tree of eight.

Measured where that takes seconds; for Core ML what the probe remembers, or a new probe when asked for.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from outrider.drafting.coreml import prompts
from outrider.drafting.coreml.converter import store
from outrider.drafting.coreml.host.host import Host
from outrider.drafting.coreml.host.line import Line
from outrider.drafting.coreml.package.layout import Function
from outrider.drafting.coreml.package.package import Package
from outrider.drafting.coreml.runtime.interpreter import NumpyRuntime
from outrider.drafting.coreml.trials import selection
from outrider.drafting.coreml.trials.packages import OfCheckpoint
from outrider.drafting.coreml.trials.probe import PREFERRED
from outrider.drafting.coreml.trials.verdicts import Tried, Verdicts
from outrider.engine.loading import load
from outrider.protocol.errors import ModelError

log = logging.getLogger(__name__)

_ROUNDS = 12
_WARM_UP = 2
_TREE = 8
_SHARED = "shares the GPU with the target: each slows the other down"
_OWN_CORES = "beside the target's GPU, on cores of its own: --draft-device cpu"
_APART = "beside the target's GPU: --draft-backend coreml"
_SAME_CPU = "shares the CPU with the target"
_SLOW = "for tests only"


@dataclass(frozen=True, slots=True)
class Placement:
    """`one_ms` and `eight_ms` are milliseconds a call, None where unknown; `engine_share` only for Core ML."""

    name: str
    usable: bool
    one_ms: float | None = None
    eight_ms: float | None = None
    engine_share: float | None = None
    note: str = ""


def on_mlx(model: Path, device: mx.DeviceType) -> Placement:
    """The draft `model` through MLX on `device`."""
    kept = mx.default_device()
    mx.set_default_device(mx.Device(device))
    try:
        loaded = load(model)
        caches = make_prompt_cache(loaded.model)

        def step(rows: int) -> None:
            mx.eval(loaded.model(mx.zeros((1, rows), mx.int32), cache=caches))

        one, eight = _time(lambda: step(1)), _time(lambda: step(_TREE))
    finally:
        mx.set_default_device(kept)
    if device == mx.gpu:
        return Placement("MLX on the GPU", True, one, eight, note=_SHARED)
    note = _OWN_CORES if kept.type == mx.gpu else _SAME_CPU
    return Placement("MLX on the CPU", True, one, eight, note=note)


def on_core_ml(packages: OfCheckpoint, try_now: bool) -> list[Placement]:
    """The verdict on each package and compute unit, remembered or tried out now; what drafts comes first."""
    if sys.platform != "darwin":
        return [Placement("Core ML on the Neural Engine", False, note="macOS only")]
    if try_now:
        selection.choose(packages, store.probes(), log.info, thorough=True)
    places = []
    for units in PREFERRED:
        rows = [row for row in Verdicts(store.probes(), packages.source_hash).rows if row.verdict.units == units]
        best = selection.quickest(rows)
        ordered = sorted(rows, key=lambda row, best=best: row is not best)
        places += [_verdict(row) for row in ordered] or [_untried(units)]
    return places


def on_prompts(packages: OfCheckpoint, try_now: bool) -> Placement | None:
    """Who reads prompts for a drafter on MLX, as measured; None where nothing was."""
    made = [packages.get(variant) for variant in packages.variants if packages.made(variant)]
    known = [kept for package in made if (kept := prompts.recall(package, store.probes())) is not None]
    if not known and try_now:
        known = [prompts.here(packages, log.info)]
    if not known:
        return None
    kept = known[0]
    return Placement("prompts of a draft on MLX", kept.least is not None, note=kept.sentence)


def on_interpreter(package: Package) -> Placement:
    """The reference interpreter."""
    host = Host(package, NumpyRuntime(package.mlpackage))
    single, tree = package.layout.smallest(1), package.layout.smallest(_TREE)
    if single is None or tree is None:
        raise ModelError(f"{package.path} has no function for one row and for {_TREE}")
    return Placement("reference interpreter", True, _feed_time(host, single), _feed_time(host, tree), note=_SLOW)


def _feed_time(host: Host, function: Function) -> float:
    line = Line(host)
    taken = _time(lambda: line.feed([1] * function.rows, function))
    line.close()
    return taken


def _verdict(row: Tried) -> Placement:
    verdict, name = row.verdict, f"Core ML on {row.verdict.units}, {row.variant}"
    if verdict.trial is None:
        return Placement(name, False, note=verdict.reason)
    trial = verdict.trial
    note = verdict.reason or _APART
    share = trial.engine_share.get("q1")
    return Placement(name, verdict.good, trial.ms.get("q1"), trial.ms.get(f"q{_TREE}"), share, note)


def _untried(units: str) -> Placement:
    return Placement(f"Core ML on {units}", False, note="not measured yet: run `outrider doctor --probe`")


def _time(task: Callable[[], object]) -> float:
    """Median milliseconds of `task`, warmed up."""
    taken = []
    for _ in range(_ROUNDS + _WARM_UP):
        started = time.perf_counter()
        task()
        taken.append(time.perf_counter() - started)
    return round(1e3 * median(taken[_WARM_UP:]), 3)
