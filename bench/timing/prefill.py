"""Who reads prompts quicker, the target itself or a prefill worker that hands over what it read: in real clusters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.sampling import SamplingParams

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
ROUNDS = 5
NEVER = 2**31 - 1
WORTH_IT = 0.95  # of the target's time
_FIRST = SamplingParams(max_tokens=1, ignore_eos=True)

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Median milliseconds until the first token of prompts of these `lengths`, read by the target and by the worker."""

    lengths: tuple[int, ...]
    own_ms: tuple[float, ...]
    worker_ms: tuple[float, ...]

    @property
    def least(self) -> int:
        """From so many tokens on the worker is quicker, whatever the length; `NEVER`: it is not."""
        found = NEVER
        for length, own, worker in reversed(list(zip(self.lengths, self.own_ms, self.worker_ms, strict=True))):
            if worker >= WORTH_IT * own:
                break
            found = length
        return found

    @property
    def sentence(self) -> str:
        rows = zip(self.lengths, self.own_ms, self.worker_ms, strict=True)
        times = "  ".join(f"{length}: {worker:.0f} ms against {own:.0f}" for length, own, worker in rows)
        verdict = "never" if self.least == NEVER else f"prompts of {self.least} tokens and more"
        return f"to be read by a prefill worker: {verdict} ({times})"


def measure(settings: dict[str, Any], context: int, vocab_size: int, show: Show) -> PrefillTimes:
    """Prompts of no meaning, which take as long as others, in one cluster without a prefill worker and one with it.

    Raises:
        OutriderError: a cluster does not come up.
    """
    lengths = tuple(length for length in LENGTHS if length < context) or (context - 1,)
    alone = {**settings, "prompt_cache": False, "draft_backend": "none", "draft_model": None, "mode": "ar"}
    times = []
    for workers in (0, 1):
        show(f"tune: prompts read by {'a prefill worker' if workers else 'the target'}")
        settings = {**alone, "prefill_workers": workers, "prefill_from": 1}
        with LocalCluster(progress=show, **settings) as cluster:
            times.append(tuple(_median_ms(cluster, length, vocab_size) for length in lengths))
    return PrefillTimes(lengths, *times)


def _median_ms(cluster: LocalCluster, length: int, vocab_size: int) -> float:
    client, found = cluster.client(), []
    for tokens in _prompts(length, vocab_size):
        found.append(client.generate(tokens, _FIRST).timings.prompt_ms)
    return statistics.median(found[1:])


def _prompts(length: int, vocab_size: int) -> Sequence[list[int]]:
    """One to warm up with, then those that count."""
    rng = np.random.default_rng(length)
    return [rng.integers(0, vocab_size, length).tolist() for _ in range(ROUNDS + 1)]
