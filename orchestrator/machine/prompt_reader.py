"""Who should read a draft's prompts on this Mac: MLX, or its Core ML package where a measurement finds that quicker.

The measurement is a process of the draft worker's and is kept by it; a drafter finds it there by itself.
"""

from __future__ import annotations

import json
import subprocess
import sys

from outrider.orchestrator.machine.spawn import child_environment, python

SECONDS = 1200.0


def measured(draft_model: str) -> str | None:
    """A sentence that says who reads which prompts, or why that is not known; None where there is no Core ML."""
    if sys.platform != "darwin":
        return None
    command = python("-m", "outrider.drafting.coreml.prompts", "--model", draft_model)
    try:
        done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"prompts stay with MLX: Core ML had not read them after {SECONDS:g} s"
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["no reason told"]
        return f"MLX reads prompts: {said[-1]}"
    return str(json.loads(done.stdout)["sentence"])
