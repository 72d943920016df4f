"""A package with the target's weights reads prompts for it, with the same keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from outrider.drafters.coreml.drafter import PackageReader
from outrider.engine.kv_cache import KVLayout
from outrider.engine.loading import load, load_lazily
from outrider.prefill_worker.worker import MlxReader, PrefillWorker
from outrider.protocol.messages import CacheReport, Prefill, PromptKv
from tests.coreml.conftest import Converted
from tests.harness.mil_interpreter import NumpyRuntime
from tests.system.links import FakeLink, run_worker

NOISE = {"fp32": 1e-4, "fp16": 0.1}


@pytest.mark.parametrize("weights", ["fp32", "fp16"])
@pytest.mark.parametrize("start", [0, 70])
def test_package_hands_over_the_keys_and_values_of_mlx(
    converted: Callable[..., Converted], text: list[int], weights: str, start: int
) -> None:
    made, prompt = converted("llama", weights=weights, max_position_embeddings=1024), text[:200]
    layout = KVLayout.of(load_lazily(str(made.model_path)).model)
    package, exact = PackageReader(made.package, NumpyRuntime(made.package.path)), MlxReader(load(made.model_path))
    found, expected = (read(reader, layout, prompt, start) for reader in (package, exact))
    for mine, other in zip(_joined(found, layout), _joined(expected, layout), strict=True):
        assert mine.shape[2] == len(prompt) - 1 - start
        assert np.abs(mine - other).max() <= NOISE[weights]


def test_prompt_beyond_the_package_context_is_left_to_the_target(
    converted: Callable[..., Converted], text: list[int]
) -> None:
    made = converted("llama", max_position_embeddings=1024)
    reader = PackageReader(made.package, NumpyRuntime(made.package.path))
    layout = KVLayout.of(load_lazily(str(made.model_path)).model)
    *pieces, fault = read(reader, layout, [*text, *text][:340], 0)
    assert sum(piece.count for piece in pieces) == made.package.layout.context == 339 - 83
    assert fault.message == "the package reads 256 tokens of a prompt; the target reads the other 83"


def read(reader: MlxReader | PackageReader, layout: KVLayout, tokens: list[int], start: int) -> list[Any]:
    """What a prefill worker sends of a prompt; its pieces follow one another."""
    link = FakeLink("prefill-0")
    run_worker(PrefillWorker(link, reader, layout), link, [Prefill("r", 0, np.array(tokens, np.int32), start)])
    sent = [message for message in link.sent if not isinstance(message, CacheReport)]
    for piece in sent:
        assert not isinstance(piece, PromptKv) or piece.start == start
        start += piece.count if isinstance(piece, PromptKv) else 0
    return sent


def _joined(pieces: list[PromptKv], layout: KVLayout) -> list[np.ndarray]:
    """The keys, and the values, of each layer, joined from all pieces."""
    unpacked = [layout.unpack(piece.data, piece.count) for piece in pieces]
    flat = [[array for pair in piece for array in pair] for piece in unpacked]
    return [np.array(mx.concatenate(list(parts), axis=2)) for parts in zip(*flat, strict=True)]
