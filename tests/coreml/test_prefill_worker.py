"""A package with the target's weights reads prompts for it, with the same keys and values."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.coreml.drafter import PackageReader
from outrider.engine.kv_cache import KVLayout
from outrider.engine.kv_rows import ReadingFault
from outrider.engine.loading import load, load_lazily
from outrider.prefill_worker.worker import CoreMLReader, MlxReader
from outrider.protocol.messages import Prefill
from tests.coreml.conftest import Converted
from tests.harness.mil_interpreter import NumpyRuntime

NOISE = {"fp32": 1e-4, "fp16": 0.1}


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("start", [0, 70])
def test_package_hands_over_the_keys_and_values_of_mlx(
    converted: Callable[..., Converted], text: list[int], weights: str, start: int
) -> None:
    made, prompt = converted("llama", weights=weights, max_position_embeddings=1024), text[:200]
    layout = KVLayout.of(load_lazily(str(made.model_path)).model)
    package = CoreMLReader(PackageReader(made.package, NumpyRuntime(made.package.path)), layout)
    exact = MlxReader(load(made.model_path))
    found, expected = [], []
    for reader, pieces in ((package, found), (exact, expected)):
        at = start
        for piece in (piece for some in reader.read(prefill(prompt, start)) for piece in some):
            assert piece.start == at
            at += piece.count
            pieces.append(layout.unpack(piece.data, piece.count))
        assert at == len(prompt) - 1
    for mine, other in zip(_joined(found), _joined(expected), strict=True):
        assert np.abs(mine - other).max() <= NOISE[weights]


def test_prompt_beyond_the_package_context_is_left_to_the_target(
    converted: Callable[..., Converted], text: list[int]
) -> None:
    made = converted("llama", max_position_embeddings=1024)
    reader = CoreMLReader(
        PackageReader(made.package, NumpyRuntime(made.package.path)),
        KVLayout.of(load_lazily(str(made.model_path)).model),
    )
    read = 0
    with pytest.raises(ReadingFault, match="the target reads the other"):
        for pieces in reader.read(prefill([*text, *text][:340])):
            read += sum(piece.count for piece in pieces)
    assert read == made.package.layout.context


def prefill(tokens: list[int], start: int = 0) -> Prefill:
    return Prefill("r", 0, np.array(tokens, np.int32), start)


def _joined(pieces: list[tuple[tuple[mx.array, mx.array], ...]]) -> list[np.ndarray]:
    """The keys, and the values, of each layer, joined from all pieces."""
    flat = [[array for pair in piece for array in pair] for piece in pieces]
    return [np.array(mx.concatenate(list(parts), axis=2)) for parts in zip(*flat, strict=True)]
