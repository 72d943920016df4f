"""How long a target's forwards over several texts take, by the drafts that each verifies; for `ceiling`.

Reads one JSON object a line from stdin, {texts, columns, drafts: [numbers]}, and answers each with {ms: [medians]}.
The numbers are timed in turns, so that a drifting machine drifts for all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.bench.helper import answer_all
from outrider.engine.loading import LoadedModel, load
from outrider.engine.open_texts import open_texts
from outrider.engine.slots import Slot
from outrider.engine.verify import Ask, begin
from outrider.orchestrator.cli import run_as_program
from outrider.protocol.sampling import SamplingParams

TURNS = 12


def times(
    model: LoadedModel,
    texts: int,
    columns: int,
    drafts: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    store, random = open_texts(model), np.random.default_rng(0)
    prompts = random.integers(0, model.vocab_size, (texts, columns)).tolist()
    slots = [Slot(model, store, prompt, SamplingParams(temp=0.8, seed=seed)) for seed, prompt in enumerate(prompts)]
    for slot in slots:
        slot.feed_all_but(1)
    taken: dict[int, list[float]] = {count: [] for count in drafts}
    for turn in range(TURNS + 1):
        for count in drafts:
            # Nothing of a chain of such tokens holds, so each text stays about as long as it was.
            chains = random.integers(0, model.vocab_size, (texts, count)).tolist()
            begun = clock()
            begin([Ask(slot, tuple(chain)) for slot, chain in zip(slots, chains, strict=True)]).verdicts()
            if turn:
                taken[count].append(1000 * (clock() - begun))
    for slot in slots:
        slot.close()
    return {"ms": [statistics.median(taken[count]) for count in drafts]}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True)


def run(options: argparse.Namespace) -> int:
    model = load(options.model)
    answer_all(lambda wish: times(model, **wish))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
