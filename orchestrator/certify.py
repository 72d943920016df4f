"""Asks the target itself whether an output is its own: runs `target_worker.certificate` as a process.

Knows the claim and the report; the replay, and MLX with it, stay in the other process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from outrider.orchestrator.failure import as_error
from outrider.orchestrator.machine import blas
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.protocol.certificate import Difference, Report
from outrider.protocol.errors import WorkerError
from outrider.protocol.sampling import SamplingParams

THREADS = 1


def certify(
    folder: Path,
    tokens: Sequence[int],
    generated: Sequence[int],
    sampling: SamplingParams,
    progress: Callable[[str], None],
    ends: Iterable[int] = (),
) -> Report:
    """Replays `generated`, said to follow `tokens`, through the model in `folder`. `progress` hears the stages.

    `ends` are the tokens that may end a grammar's text.

    Raises:
        OutriderError: of the class the process named; WorkerError when it ends without a word.
    """
    claim = {
        "model": os.fspath(folder),
        "tokens": list(tokens),
        "generated": list(generated),
        "sampling": dataclasses.asdict(sampling),
        "ends": list(ends),
    }
    environment = blas.environment(child_environment(), THREADS)
    command = python("-m", "outrider.target_worker.certificate")
    with (
        tempfile.TemporaryFile("w+") as stdin,
        subprocess.Popen(
            command, stdin=_written(stdin, claim), stdout=subprocess.PIPE, env=environment, text=True,
            start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            report = _listen(process.stdout or (), progress)
        finally:
            process.kill()  # it has said all it had to say, or nobody listens any more
    if report is None:
        raise WorkerError(f"the replay ended with code {process.returncode} before its report; its stderr tells why")
    return report


def _written(file: IO[str], claim: dict[str, Any]) -> IO[str]:
    json.dump(claim, file)
    file.seek(0)
    return file


def _listen(lines: Iterable[str], progress: Callable[[str], None]) -> Report | None:
    return next((report for line in lines if (report := _take(json.loads(line), progress)) is not None), None)


def _take(told: dict[str, Any], progress: Callable[[str], None]) -> Report | None:
    if "error" in told:
        raise as_error(told["kind"], told["error"])
    if "positions" in told:
        ties, mismatches = (tuple(Difference(**one) for one in told[name]) for name in ("ties", "mismatches"))
        return Report(told["positions"], told["identical"], ties, mismatches, told["context_length"])
    progress(told.get("stage") or f"replaying: {told['position']} of {told['of']} tokens")
    return None
