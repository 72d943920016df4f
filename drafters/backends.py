"""Which drafters there are, by name, and how each is made. A new one is a file, a line here and a name in settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.drafters.drafter import Drafter
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.heads import AHEAD

Progress = Callable[[str], None]


def _mlx(model: str, prefill: str, progress: Progress) -> Drafter:
    from outrider.drafters.coreml.prompts import reader_for
    from outrider.drafters.mlx import MlxDrafter

    return MlxDrafter.load(model, progress, reader_for(model, prefill, progress))


def _replay(model: str, prefill: str, progress: Progress) -> Drafter:
    from outrider.drafters.replay import ReplayDrafter, Script

    return ReplayDrafter(Script.read(Path(model)))


def _coreml(model: str, prefill: str, progress: Progress) -> Drafter:
    from outrider.drafters.coreml.load import load

    return load(model, progress)


BACKENDS: dict[str, Callable[[str, str, Progress], Drafter]] = {"coreml": _coreml, "mlx": _mlx, "replay": _replay}
NAMES = (*sorted(BACKENDS), *AHEAD)


def _head(kind: str, model: str, target: str, progress: Progress) -> Drafter:
    from outrider.drafters.heads.ahead import AheadHead

    return AheadHead.load(kind, model, target, progress)


def make(backend: str, model: str, progress: Progress, prefill: str = "auto", target: str = "") -> Drafter:
    """The drafter `backend` for `model` (a model directory; for `replay` its script; `coreml` takes a package too).

    Args:
        prefill: who reads prompts for `mlx`, see `drafters.coreml.prompts`.
        target: the folder of the model whose rows a head reads.
    """
    if backend in AHEAD:
        return _head(backend, model, target, progress)
    if backend not in BACKENDS:
        raise InvalidRequest(f"unknown drafter {backend!r}; expected one of {', '.join(NAMES)}")
    return BACKENDS[backend](model, prefill, progress)
