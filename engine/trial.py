"""Ways of computing with a model, tried at load: what a way that fails has put into the model is taken out again."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.nn as nn

from outrider.engine.loading import LoadedModel
from outrider.protocol.errors import ModelError
from outrider.protocol.guard import first_line, named_errors

log = logging.getLogger(__name__)


def fault(model: LoadedModel, what: str, agrees: Callable[[], bool]) -> str:
    """Why `what`, tried by `agrees`, is not for this model; empty: it is, and what it installed stays."""
    with _restored(model.model) as keep:
        try:
            with named_errors(what, logging.INFO):
                if agrees():
                    keep()
                    return ""
            reason = "its logits differ"
        except ModelError as error:
            reason = first_line(error)
    log.info("%s: not for a %s model: %s", what, model.model_type, reason)
    return reason


@contextmanager
def _restored(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Puts the parts of a model, and the names of the modules of Python that they come from, back as they were.

    Not where the block has called what it is given.
    """
    parts = [(part, dict(part)) for part in model.modules()]
    names = [vars(sys.modules[name]) for name in {type(part).__module__ for part, _ in parts} if name in sys.modules]
    functions = [(known, dict(known)) for known in names]
    kept = False

    def keep() -> None:
        nonlocal kept
        kept = True

    try:
        yield keep
    finally:
        if not kept:
            for now, before in [*parts, *functions]:
                for name in before:
                    if now.get(name) is not before[name]:
                        now[name] = before[name]
