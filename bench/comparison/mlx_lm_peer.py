"""Runs mlx-lm's own loops on the same weights. `peers` starts its process.

Both models use float32 on a CPU, as ours do where MLX computes them.
"""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.generate import BatchGenerator
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_tokenizer

from outrider.engine.loading import load


class MlxLm:
    """Both models in one process, as mlx-lm's speculative decoding needs; plain decoding only without a draft model."""

    def __init__(self, model: str, draft_model: str | None) -> None:
        self._target = load(model).model
        self._draft = load(draft_model).model if draft_model is not None else None
        self._tokenizer: Any = load_tokenizer(model)
        self._ends = set(self._tokenizer.eos_token_ids)

    def run(
        self, tokens: list[int], max_tokens: int, num_draft_tokens: int, temp: float, seed: int, ignore_eos: bool
    ) -> dict[str, Any]:
        mx.random.seed(seed)
        self._tokenizer.eos_token_ids = set() if ignore_eos else self._ends
        options: dict[str, Any] = {"sampler": make_sampler(temp), "max_tokens": max_tokens}
        if num_draft_tokens:
            options |= {"draft_model": self._draft, "num_draft_tokens": num_draft_tokens}
        generated, first = [], 0.0
        for response in stream_generate(self._target, self._tokenizer, tokens, **options):
            first = first or time.perf_counter()
            generated.append(response.token)
        return {"tokens": generated, "count": len(generated), "decode_seconds": time.perf_counter() - first}

    def batch(
        self, batch: list[list[int]], max_tokens: int, temp: float, seed: int, slots: int, reads: int
    ) -> dict[str, Any]:
        """Decodes all prompts plainly, at most `slots` at once: `batch_generate` with the time of each step."""
        mx.random.seed(seed)
        begun = time.perf_counter()
        generator = BatchGenerator(
            self._target,
            max_tokens=max_tokens,
            sampler=make_sampler(temp),
            completion_batch_size=slots,
            prefill_batch_size=reads,
        )
        arrivals: dict[int, list[tuple[float, int]]] = {number: [] for number in generator.insert(batch)}
        while responses := generator.next_generated():
            now = time.perf_counter() - begun
            for response in responses:
                arrivals[response.uid].append((now, 1))
        generator.close()
        # Waiting prompts start in order as slots become free.
        sent = [0.0] * slots + sorted(times[-1][0] for times in arrivals.values())
        return {"replies": [{"sent": at, "arrivals": a} for at, a in zip(sent, arrivals.values(), strict=False)]}
