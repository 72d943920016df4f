"""How the workers of a simulated machine are started, and how they report that they are too slow for it.

`simulated_machine` sets the environment in which clusters start the workers of this package; `take_options` is for the
workers themselves. A worker whose forwards take longer than the profile's reports that in a note to its server, and in
a file that `simulated_machine` reads.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

from outrider.protocol.errors import WorkerError
from outrider.protocol.messages import WorkerNote
from outrider.protocol.worker_link import WORKER_MODULES_VARIABLE, WorkerLink
from tools.simulation.profile import Profile

LATE_FILE_VARIABLE = "OUTRIDER_SIMULATION_LATE"
"""The environment variable with the file for reports of workers that are too slow."""


@contextmanager
def simulated_machine(profile: Path, script: Path | None = None) -> Iterator[Callable[[], None]]:
    """Lets clusters that start in this block simulate the profile's machine; drafters replay `script`, if there is one.

    Yields a check that the profile's times were kept since the last check. The end of the block does the same.

    Raises:
        InvalidRequest: the profile or the script can't be used.
        WorkerError: a worker was too slow, so the results do not describe the profile's machine.
    """
    Profile.read(profile)
    options = ["--profile", str(profile.resolve())]
    drafter = ["tools.simulation.drafter", *options]
    if script is not None:
        from tools.simulation.replay import Script  # imports MLX, which a target must not have done before it has ranks

        Script.read(script)
        drafter += ["--script", str(script.resolve())]
    modules = {"target": ["tools.simulation.target", *options], "draft": drafter}
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        check = partial(_check_not_late, Path(folder) / "late")
        with patch.dict(
            os.environ, {WORKER_MODULES_VARIABLE: json.dumps(modules), LATE_FILE_VARIABLE: str(Path(folder) / "late")}
        ):
            yield check
        check()


def _check_not_late(late: Path) -> None:
    if late.exists():
        report = late.read_text(encoding="utf-8").splitlines()[0]
        late.unlink()
        raise WorkerError(f"the simulation failed: {report}")


def take_options() -> argparse.Namespace:
    """Removes the options of a simulated worker, `profile` and `script`, from the command line, and returns them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--script", type=Path)
    options, sys.argv[1:] = parser.parse_known_args()
    return options


def report_too_slow(link: WorkerLink, why: str) -> None:
    """Reports that the worker of this link is too slow."""
    link.send(WorkerNote(why))
    if LATE_FILE_VARIABLE in os.environ:
        with open(os.environ[LATE_FILE_VARIABLE], "a", encoding="utf-8") as file:
            file.write(f"{link.name}: {why}\n")
