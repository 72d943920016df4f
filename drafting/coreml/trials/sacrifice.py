"""A program run in a process that may die: what it wrote, or how it ended. Knows nothing of what it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ABSENT = 20
"""The exit code of a program whose device is not there at all."""
_ROOT = Path(__file__).absolute().parents[4]


@dataclass(frozen=True, slots=True)
class Ending:
    """`written`: what the program left, None when it left nothing, and then `reason` says why.

    `final`: the device is not there or does not come back, so that another try of the like is of no use.
    """

    written: str | None
    reason: str = ""
    final: bool = False


def command(module: str, *arguments: str) -> list[str]:
    """The command line of one of this project's modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def environment() -> dict[str, str]:
    """This process's, in which the project is found from everywhere."""
    paths = [str(_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def run(module: str, arguments: list[str], seconds: float) -> Ending:
    """Runs `module` with `arguments` and --result FILE, for at most so many seconds."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        line = command(module, *arguments, "--result", str(result))
        try:
            done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=seconds, env=environment())
        except subprocess.TimeoutExpired:
            return Ending(None, f"its trial was still running after {seconds:.0f} seconds", final=True)
        if not result.is_file():
            return Ending(None, _reason(done), final=done.returncode == ABSENT)
        return Ending(result.read_text(encoding="utf-8"))


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its trial was ended by {_signal(-done.returncode)}"
    lines = done.stderr.strip().splitlines()
    return f"its trial failed: {lines[-1]}" if lines else f"its trial failed with exit code {done.returncode}"


def _signal(number: int) -> str:
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")
