"""What the second turn of a conversation costs: how long target and drafter read it, over how long they read the first.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python -m tools.conversation
    ... -m tools.conversation --tokens 400 --turns 9

Both models are in this process, on their own caches, without sockets: the first turn's text is read, then the same text
with 48 tokens more, what was said and asked since. Medians; on Linux the preloaded library is what workers compute by.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import mlx.core as mx

from outrider.drafters.mlx import MlxDrafter
from outrider.engine.kv_cache import CacheSlot
from outrider.engine.load_checks import open_kv_cache, sequence_cost
from outrider.engine.loading import load
from outrider.engine.prompt_cache import PromptCache
from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.pairing.model_files import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.protocol.sampling import SamplingParams
from tests.harness.default_model import words

NEW = 48
ROOM = 1 << 30
SAMPLING = SamplingParams()

Turn = Callable[[Sequence[int]], float]


def drafts(path: str) -> Turn:
    """One turn on the drafter: the seconds in which it reads the text, which it keeps afterwards."""
    drafter = MlxDrafter.load(path, lambda stage: None)
    drafter.prompt_cache.allow(ROOM)

    def turn(tokens: Sequence[int]) -> float:
        begun = time.perf_counter()
        tree = drafter.open(tokens, SAMPLING)
        tree.best([tree.root])
        read = time.perf_counter() - begun
        tree.close()
        return read

    return turn


def targets(path: str) -> Turn:
    """The same on the target."""
    model = load(path)
    kv_cache = open_kv_cache(model)
    cache = PromptCache(sequence_cost(kv_cache), ROOM)

    def turn(tokens: Sequence[int]) -> float:
        begun = time.perf_counter()
        slot, start = CacheSlot(model, kv_cache, tokens, SAMPLING), cache.find(tokens)
        if start is not None:
            slot.begin(start)
        slot.feed_all_but(1)
        mx.eval(slot.forward(slot.unfed))
        read = time.perf_counter() - begun
        cache.keep(tokens, slot.save(len(tokens)))
        slot.close()
        return read

    return turn


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=700, help="of the first turn")
    parser.add_argument("--turns", type=int, default=5, help="conversations, one after the other")


def run(options: argparse.Namespace) -> int:
    everything = words()
    for name, turn in (("target", targets(str(EMBEDDED_TARGET))), ("drafter", drafts(str(EMBEDDED_DRAFT)))):
        first, second = [], []
        for number in range(options.turns + 1):
            # A token of its own in front: each conversation begins cold.
            text = [number + 5, *everything[: options.tokens - 1]]
            first.append(turn(text))
            second.append(turn([*text, *everything[-NEW:]]))
        cold, warm = median(first[1:]), median(second[1:])
        print(f"{name}: first turn {1000 * cold:.1f} ms, second {1000 * warm:.1f} ms: {warm / cold:.3f} of it")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
