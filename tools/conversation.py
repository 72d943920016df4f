"""Measures prefix caching: how long target and drafter read the second turn of a conversation, relative to the first.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python -m tools.conversation
    ... -m tools.conversation --tokens 400 --turns 9

Both models run in this process with their own caches, without sockets. The text of the first turn is read, then the
same text with 48 more tokens (the answer and the next question). Prints medians; on Linux preload the workers' BLAS.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import mlx.core as mx

from outrider.drafters.mlx import MlxDrafter
from outrider.engine.kv_cache import CacheSlot
from outrider.engine.load_checks import measure_sequence_cost, open_kv_cache
from outrider.engine.loading import load
from outrider.engine.prompt_cache import PromptCache
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.pairing.model_files import TINY_DRAFT, TINY_TARGET
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import all_prompt_tokens

NEW_TOKENS = 48
CACHE_BYTES = 1 << 30
SAMPLING = SamplingParams()

Turn = Callable[[Sequence[int]], float]


def make_drafter_turn(path: str) -> Turn:
    """Returns a function that reads a text with the drafter, keeps it in the prompt cache, and returns the seconds."""
    drafter = MlxDrafter.load(path, lambda stage: None)
    drafter.prompt_cache.set_limit(CACHE_BYTES)

    def turn(tokens: Sequence[int]) -> float:
        started = time.perf_counter()
        tree = drafter.open(tokens, SAMPLING)
        while tree.committed_len < len(tokens):
            tree.read(tokens[tree.committed_len :])
        tree.best([tree.root])
        read = time.perf_counter() - started
        tree.close()
        return read

    return turn


def make_target_turn(path: str) -> Turn:
    """Returns the same function for the target."""
    model = load(path)
    kv_cache = open_kv_cache(model)
    cache = PromptCache(measure_sequence_cost(kv_cache), CACHE_BYTES)

    def turn(tokens: Sequence[int]) -> float:
        started = time.perf_counter()
        slot, start = CacheSlot(model, kv_cache, tokens, SAMPLING), cache.find(tokens)
        if start is not None:
            slot.begin(start)
        slot.feed_all_but_last()
        mx.eval(slot.forward(slot.unfed))
        read = time.perf_counter() - started
        cache.store(tokens, slot.save)
        slot.close()
        return read

    return turn


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=700, help="tokens of the first turn (default: 700)")
    parser.add_argument("--turns", type=int, default=5, help="conversations, one after another (default: 5)")


def run(options: argparse.Namespace) -> int:
    tokens = all_prompt_tokens()
    for name, turn in (
        ("target", make_target_turn(str(TINY_TARGET))),
        ("drafter", make_drafter_turn(str(TINY_DRAFT))),
    ):
        first, second = [], []
        for number in range(options.turns + 1):
            # A different first token, so that each conversation begins with a cold cache.
            text = [number + 5, *tokens[: options.tokens - 1]]
            first.append(turn(text))
            second.append(turn([*text, *tokens[-NEW_TOKENS:]]))
        cold, warm = median(first[1:]), median(second[1:])
        print(f"{name}: first turn {1000 * cold:.1f} ms, second {1000 * warm:.1f} ms, ratio {warm / cold:.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
