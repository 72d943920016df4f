"""Writes the target of a simulated machine, and the script that its drafter replays: the target's texts.

The target is a tiny random model, whose forwards take almost no time, with the tiny target's tokenizer. Its texts are
meaningless; the profile sets the acceptance of the drafter.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.pairing.model_files import TINY_TARGET
from outrider.protocol.sampling import SamplingParams

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 4096,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
PROMPT_TOKENS = 16
SPARE_TOKENS = 64
"""Tokens of a script beyond the last requested one, because a chain may reach beyond it."""


def random_prompts(count: int) -> list[tuple[int, ...]]:
    """Returns `count` prompts, always the same."""
    rng = random.Random(0)
    return [tuple(rng.randrange(2, CONFIG["vocab_size"]) for _ in range(PROMPT_TOKENS)) for _ in range(count)]


def write_model_and_script(folder: Path, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Path:
    """Writes a target to `folder`, and a script with its texts after these prompts. Returns the path of the script.

    Prompt n has seed n, as in `run_interleaved`. Acceptance and bonus ranks come from the profile.
    """
    write_target(folder)
    longer, texts = replace(sampling, max_tokens=sampling.max_tokens + SPARE_TOKENS), []
    with LocalCluster(model=str(folder), draft_backend="none", mode="ar", memory=False) as cluster:
        client = cluster.client(60.0)
        for number, prompt in enumerate(prompts):
            texts.append([*prompt, *client.generate(prompt, replace(longer, seed=number), mode="ar").token_ids])
    script = {"texts": texts, "acceptance": [1.0], "bonus_ranks": [], "vocab_size": CONFIG["vocab_size"]}
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    return path


def write_target(folder: Path) -> None:
    """Writes the random model and the tokenizer."""
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(CONFIG))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_TARGET / name, folder / name)
