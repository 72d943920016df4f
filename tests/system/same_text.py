"""Checks that two texts have the same tokens, except for certified ties with OpenBLAS, whose sums depend on shapes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.engine.loading import LoadedModel
from outrider.protocol.sampling import SamplingParams
from outrider.protocol.stats import Claim
from outrider.target_worker.certificate import certify

PROCESS_MAPS = Path("/proc/self/maps")


def uses_openblas() -> bool:
    """Whether this process uses OpenBLAS: then a forward of several tokens rounds differently from single ones."""
    return PROCESS_MAPS.exists() and "openblas" in PROCESS_MAPS.read_text()


def check_same(
    model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams, got: Sequence[int], expected: Sequence[int]
) -> None:
    """Fails unless `got` equals `expected`, or, with OpenBLAS, differs from it by certified ties only."""
    if list(got) == list(expected):
        return
    at = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), "the end")
    assert uses_openblas(), f"differs at {at}: {list(got)} is not {list(expected)}"
    report = certify(model, Claim("", tuple(prompt), tuple(got), sampling))
    assert not report.mismatches, f"differs at {at}, and no tie: {report.mismatches}"
    assert len(got) == len(expected)
