"""How answers name what made them: the server's fingerprint, and what gives a text again."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.orchestrator.client.result import GenerationResult
from outrider.protocol.version import PACKAGE_VERSION
from outrider.server.shapes.base import Outrider

FINGERPRINT = f"outrider-{PACKAGE_VERSION}"


def about(result: GenerationResult | None, seed: int, notes: Sequence[str] = ()) -> Outrider:
    """`seed` is told where there is no result, as of a choice that was ended at its first call; `notes` come first."""
    if result is None:
        return Outrider(seed=seed, mode="", notes=list(notes))
    return Outrider(seed=result.seed, mode=result.mode, notes=[*notes, *result.notes])
