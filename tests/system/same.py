"""The meaning of "the same text": equal tokens, except certified ties with OpenBLAS, whose sums depend on the shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.engine.loading import LoadedModel
from outrider.protocol.sampling import SamplingParams
from outrider.target_worker.certificate import Claim, certify

PROCESS_MAPS = Path("/proc/self/maps")


def rounds_by_shape() -> bool:
    """Whether this process computes with OpenBLAS: then a chunk and single steps may differ in the last bits."""
    return PROCESS_MAPS.exists() and "openblas" in PROCESS_MAPS.read_text()


def check_same(
    model: LoadedModel, prompt: Sequence[int], sampling: SamplingParams, got: Sequence[int], expected: Sequence[int]
) -> None:
    """Fails unless `got` is `expected`, or, where chunks and single steps round differently, the model's text too."""
    if list(got) == list(expected):
        return
    at = next((i for i, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), "the end")
    assert rounds_by_shape(), f"differs at {at}: {list(got)} is not {list(expected)}"
    report = certify(model, Claim("", tuple(prompt), tuple(got), sampling))
    assert not report.mismatches, f"differs at {at}, and no tie: {report.mismatches}"
    assert len(got) == len(expected)
