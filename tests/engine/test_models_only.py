"""A worker's process imports mlx-lm's models, but not its tokenizers and downloads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.orchestrator.machine.spawn import child_environment

ALL = "huggingface_hub tokenizers transformers"
LOAD = """
import sys
from pathlib import Path
from outrider.engine import models_only
models_only.LEFT_OUT = {name: names for name, names in models_only.LEFT_OUT.items() if name not in sys.argv[2:]}
models_only.LEFT_OUT |= dict.fromkeys(sys.argv[2:], ())
models_only.models_only()
models_only.models_only()
from outrider.engine.loading import load
import outrider.target_worker.worker, outrider.draft_worker.worker, outrider.prefill_worker.worker
import outrider.drafters.mlx, outrider.drafters.heads.load, outrider.drafters.heads.trees
load(sys.argv[1])
heavy = sorted({"transformers", "tokenizers", "huggingface_hub"} & set(sys.modules))
from huggingface_hub import snapshot_download
from mlx_lm.tokenizer_utils import TokenizerWrapper
assert snapshot_download is not object and TokenizerWrapper is not object
print(*heavy)
"""


@pytest.mark.parametrize(("more", "heavy"), [([], ""), (["mlx_lm.tokenizer_utils"], ALL)])
def test_loading_a_model_imports_no_tokenizers_or_downloads(
    tiny_model: Callable[..., Path], more: list[str], heavy: str
) -> None:
    """If mlx-lm needs more names of a module than `LEFT_OUT` lists, all modules are imported."""
    loaded = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, tiny_model(), *more],
        env=child_environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == heavy
