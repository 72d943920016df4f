"""Writes the script that a drafter replays for a stand-in target: the target's own texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.sampling import SamplingParams
from tools.simulation.stand_in import CONFIG

PROMPT_TOKENS = 16


def random_prompts(count: int) -> list[tuple[int, ...]]:
    """Returns `count` prompts, always the same."""
    rng = random.Random(0)
    return [tuple(rng.randrange(2, CONFIG["vocab_size"]) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def write_script(
    path: Path, model: Path, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]
) -> None:
    """Writes how the target at `model` continues each prompt; acceptance and ranks come from the profile."""
    with LocalCluster(model=str(model), draft_backend="none", mode="ar", memory=False) as cluster:
        client = cluster.client(60.0)
        texts = [
            [*prompt, *client.generate(prompt, sampling, mode="ar").token_ids]
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
    script = {"texts": texts, "acceptance": [1.0], "bonus_ranks": [], "vocab_size": CONFIG["vocab_size"]}
    path.write_text(json.dumps(script))
