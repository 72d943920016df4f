"""Writes the stand-in target of a simulated machine, and the script that its drafter replays: the target's texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.protocol.sampling import SamplingParams
from tools.simulation.stand_in import CONFIG, write_stand_in

PROMPT_TOKENS = 16
SPARE_TOKENS = 64
"""Tokens of a script beyond the last requested one, because a chain may reach beyond it."""


def random_prompts(count: int) -> list[tuple[int, ...]]:
    """Returns `count` prompts, always the same."""
    rng = random.Random(0)
    return [tuple(rng.randrange(2, CONFIG["vocab_size"]) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def write_model_and_script(folder: Path, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Path:
    """Writes a stand-in target to `folder`, and a script of its texts after these prompts. Returns the script's path.

    Prompt n has seed n, as in `run_interleaved`. Acceptance and bonus ranks come from the profile.
    """
    write_stand_in(folder)
    longer, texts = replace(sampling, max_tokens=sampling.max_tokens + SPARE_TOKENS), []
    with LocalCluster(model=str(folder), draft_backend="none", mode="ar", memory=False) as cluster:
        client = cluster.client(60.0)
        for number, prompt in enumerate(prompts):
            texts.append([*prompt, *client.generate(prompt, replace(longer, seed=number), mode="ar").token_ids])
    script = {"texts": texts, "acceptance": [1.0], "bonus_ranks": [], "vocab_size": CONFIG["vocab_size"]}
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    return path
