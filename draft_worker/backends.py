"""Which drafters there are, by name, and how each is made. A new drafter is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from draft_worker.drafter import Drafter
from protocol.errors import InvalidRequest

Progress = Callable[[str], None]


def _mlx(model: str, progress: Progress) -> Drafter:
    from draft_worker.mlx import MlxDrafter

    return MlxDrafter.load(model, progress)


def _replay(model: str, progress: Progress) -> Drafter:
    from draft_worker.replay import ReplayDrafter, Script

    return ReplayDrafter(Script.read(Path(model)))


def _coreml(model: str, progress: Progress) -> Drafter:
    from draft_worker.coreml.load import load

    return load(model, progress)


BACKENDS: dict[str, Callable[[str, Progress], Drafter]] = {"coreml": _coreml, "mlx": _mlx, "replay": _replay}


def make(backend: str, model: str, progress: Progress) -> Drafter:
    """The drafter `backend` for `model` (a model directory; for `replay` its script; `coreml` takes a package too)."""
    if backend not in BACKENDS:
        raise InvalidRequest(f"no drafter is called {backend!r}; there are {', '.join(sorted(BACKENDS))}")
    return BACKENDS[backend](model, progress)
