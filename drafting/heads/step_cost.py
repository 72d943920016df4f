"""What a token of a head's chain takes over a step of its target, in the target's process: both in turns, at load.

The least of a few turns counts, so that what else runs on the machine is mostly left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from outrider.drafting.heads.drafter import HeadDrafter
from outrider.drafting.heads.line import Line
from outrider.engine.loading import LoadedModel
from outrider.engine.slots import open_slots
from outrider.engine.verify import verify
from outrider.protocol.sampling import SamplingParams

DEPTH = 4  # as deep as chains are by default: a block's price is that of all its tokens
_PROMPT, _TURNS = 16, 6


def step_cost(
    drafter: HeadDrafter, target: LoadedModel, seconds: Callable[[], float] = time.perf_counter
) -> float | None:
    """None: it drafts nothing here. Rows are of no meaning: what they are changes no time."""
    draws, sampling = np.random.default_rng(0), SamplingParams(temp=1.0, seed=1)
    tokens = draws.integers(0, min(target.vocab_size, 9), _PROMPT).tolist()
    slot, follower = open_slots(target, [tokens], [sampling])[0], drafter.follow(sampling)
    width, heard = drafter.head.points.count * int(target.config["hidden_size"]), 0
    steps, chains = list[float](), list[float]()
    try:
        for _ in range(_TURNS):
            began = seconds()
            tokens.append(verify(slot).bonus)
            verified = seconds()
            rows = mx.array(draws.standard_normal((len(tokens) - 1 - heard, width)), mx.float32)
            follower.hear(heard, drafter.head.fuse(rows))
            heard = len(tokens) - 1
            (found,) = drafter.continuations([Line(follower, tokens)], [DEPTH])
            if not found.chain:
                return None
            chains.append((seconds() - verified) / len(found.chain))
            steps.append(verified - began)
    finally:
        follower.close()
        slot.close()
    return min(chains[1:]) / max(min(steps[1:]), 1e-9)
