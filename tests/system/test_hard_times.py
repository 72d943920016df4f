"""A cluster on a machine with full disks, without a home directory, and with a wall clock that jumps by hours.

`ulimit -f 0` prevents files from growing, as on a full disk. `jumping_clock.c` replaces the clock.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.engine.loading import LoadedModel
from outrider.orchestrator.pairing.tokenizer import TextCodec
from outrider.protocol.sampling import SamplingParams
from tests.slots import open_slots, verify
from tests.tiny import Pair

SOURCE = Path(__file__).with_name("jumping_clock.c")
PROMPT = "def fibonacci(n):"
TOKENS = 24
SAMPLING = SamplingParams(max_tokens=TOKENS, temp=0.8, seed=5)
ASK = ("--max-tokens", str(TOKENS), "--seed", "5", "--temp", "0.8", "--json", "--ignore-chat-template", "--ignore-eos")


@pytest.fixture
def jumping(tmp_path: Path) -> dict[str, str]:
    """The environment variables that make a program's wall clock jump."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a clock that jumps is compiled for Linux")
    library = tmp_path / "jumping.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def test_jumping_clock_library_makes_the_clock_jump(jumping: dict[str, str]) -> None:
    code = "import time; report = [time.time() for _ in range(20)]; print(max(report) - min(report) > 10 * 3600)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **jumping}, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_full_disks_no_home_and_a_jumping_clock_change_no_token(
    jumping: dict[str, str], served: Pair, served_target: LoadedModel, codec: TextCodec
) -> None:
    ask = f'ulimit -f 0; exec "{sys.executable}" "$@"'
    models = ("--model", str(served.target), "--draft-model", str(served.draft))
    command = ("-m", "outrider", "generate", "--prompt", PROMPT, *models, *ASK)
    environment = {**os.environ, **jumping, "HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null/cache"}
    done = subprocess.run(["bash", "-c", ask, "bash", *command], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    (slot,) = open_slots(served_target, [codec.encode(PROMPT)], [SAMPLING])
    assert report["token_ids"] == [verify(slot).bonus for _ in range(TOKENS)]
    assert done.stderr.count("can't be saved in") == 1
    assert "Traceback" not in done.stderr and "started again" not in done.stderr, done.stderr
