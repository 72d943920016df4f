"""Lists the files that SSD rounds pass through, in each process, in the order in which they are first called.

    python -m tools.round_files

A cluster with the tiny pair runs in processes of its own, with a profile hook that records which file is called when.
Only calls in the middle of a text count, not those that open or end it. The rounds counted include hits, misses and
fallbacks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.orchestrator.cli import run_as_program
from outrider.orchestrator.machine.spawn import child_environment
from outrider.protocol.errors import OutriderError

ROOT = Path(__file__).parents[1]
FOLDER = "OUTRIDER_ROUND_FILES"
BUCKET_S = 0.05
LAST_REPORT_S = 20.0

HOOK = f'''
import atexit, json, os, signal, sys, threading, time
calls = {{}}
own = {str(ROOT) + os.sep!r}
def hook(frame, event, argument):
    if event == "call":
        name = frame.f_code.co_filename
        if name.startswith(own) and ".venv" not in name:
            calls.setdefault(name, set()).add(int(time.monotonic() / {BUCKET_S}))
def save():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the server ends workers that are slow to end
    path = os.path.join(os.environ["{FOLDER}"], f"{{os.getpid()}}.json")
    with open(path + ".part", "w") as file:
        json.dump({{"command": sys.orig_argv, "calls": {{k: sorted(v) for k, v in list(calls.items())}}}}, file)
    os.replace(path + ".part", path)  # a process that is killed here leaves no partial file
threading.setprofile(hook)
sys.setprofile(hook)
atexit.register(save)
'''

PROGRAM = """
import json, sys, time
from outrider import LocalCluster
with LocalCluster(model="tiny") as cluster:
    times, count = [], 0
    settings = {"max_tokens": 160, "temperature": 0.8, "seed": 1, "ignore_eos": True, "mode": "ssd"}
    for chunk in cluster.client().stream("def fibonacci(n):", **settings):
        count += len(chunk.token_ids)
        times.append((count, time.monotonic()))
begin = next(at for done, at in times if done >= 40)
end = next(at for done, at in times if done >= 120)
json.dump([begin, end], open(sys.argv[1], "w"))
"""

ROLES = {"outrider.target_worker": "target", "outrider.draft_worker": "drafter", "serve": "orchestrator"}


def traced(folder: Path) -> dict[str, list[str]]:
    """Returns the files of each process, relative to the root, in the order of their first calls.

    Raises:
        OutriderError: the run failed.
    """
    (folder / "sitecustomize.py").write_text(HOOK)
    (folder / "program.py").write_text(PROGRAM)
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    command = [sys.executable, str(folder / "program.py"), str(folder / "window")]
    done = subprocess.run(
        command, env={**environment, FOLDER: str(folder)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise OutriderError(f"the traced program failed: {done.stderr.strip()[-2000:]}")
    begin, end = (int(at / BUCKET_S) for at in json.loads((folder / "window").read_text()))
    deadline = time.monotonic() + LAST_REPORT_S
    reports = _read_reports(folder)
    while (missing := {"client", *ROLES.values()} - {role for role, _ in reports}) and time.monotonic() < deadline:
        time.sleep(BUCKET_S)  # workers end shortly after the program
        reports = _read_reports(folder)
    if missing:
        raise OutriderError(f"no report came from the {' and the '.join(sorted(missing))}; run it again")
    found: dict[str, list[str]] = defaultdict(list)
    for role, report in reports:
        files = [file for file, when in report["calls"].items() if any(begin < at < end for at in when)]
        found[role] += [str(Path(file).resolve().relative_to(ROOT)) for file in files]
    return found


def _read_reports(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Returns the complete reports, with the role of the process that wrote each."""
    reports = []
    for path in sorted(folder.glob("*.json")):
        with suppress(ValueError):  # it is being written
            report = json.loads(path.read_text())
            reports.append(
                (next((role for word, role in ROLES.items() if word in report["command"]), "client"), report)
            )
    return reports


def add_flags(parser: argparse.ArgumentParser) -> None:
    """There are no flags."""


def run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = traced(Path(folder))
    for role in ("client", *ROLES.values()):
        print(f"{role}: {len(found[role])} files")
        print("".join(f"  {file}\n" for file in found[role]))
    serving = {file for role in ROLES.values() for file in found[role]}
    others = set(found["client"]) - serving
    print(f"{len(serving)} different files in the three processes of a round, and {len(others)} in the client's")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
