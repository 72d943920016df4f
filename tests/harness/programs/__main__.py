"""Runs a task with each program that uses these APIs: a stream, a tool call with its result, JSON, or writing a file.

    python -m tests.harness.programs --set-up ~/programs            # prints the commands that install them
    python -m tests.harness.programs ~/programs                     # runs the installed ones: some two minutes
    python -m tests.harness.programs ~/programs --only codex,llm
    python -m tests.harness.programs ~/programs --write docs/conformance.md  # the table of that page

A scripted model with known answers serves them, so that only the programs' requests and parsing are tested. Nothing is
installed, and no program reads your settings. The exit code is 1 if a program fails.
"""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.orchestrator.cli import run_as_program
from tests.harness.conformance.http_client import Server
from tests.harness.conformance.servers import serve_pair
from tests.harness.conformance.table import CLIENTS
from tests.harness.programs.agents import AGENTS
from tests.harness.programs.libraries import LIBRARIES
from tests.harness.programs.program import Program, ProgramRun, find_problems
from tests.harness.programs.script import write_model

PROGRAMS = (*LIBRARIES, *AGENTS)
HEAD = """The newest versions of these clients ran the same tasks against a server with a scripted model: a *stream*; a
tool that is called (*city*) and whose result is read (*answer*), by the client's own loop where it has one; a *form* by
a schema, whole and in *parts*; a *file* that an agent writes. This command writes the table:

    python -m tests.harness.programs FOLDER --write docs/conformance.md
"""
MAX_ERROR_CHARS = 500
"""Characters of a failed program's output to print."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="folder with a subfolder for each program")
    parser.add_argument("--set-up", action="store_true", help="print the commands that install them there")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table at the end of this page")
    parser.add_argument("--only", default="", help="comma-separated programs to run")


def run(options: argparse.Namespace) -> int:
    chosen = [name.strip() for name in options.only.lower().split(",") if name.strip()]
    programs = [one for one in PROGRAMS if not chosen or one.folder in chosen]
    if options.set_up:
        print("\n".join(program.set_up(str(options.folder)) for program in programs))
        return 0
    installed = [program for program in programs if program.is_installed_in(options.folder / program.folder)]
    failed = 0
    with TemporaryDirectory(prefix="outrider-programs-") as home:
        homes = {program.name: Path(home, program.folder) for program in PROGRAMS}
        model = write_model(Path(home, "model"), homes)
        rows = ["| program | version | API | did |", "|---|---|---|---|"]
        print("\n".join(rows))
        with serve_pair(model, model, ("scripted",)) as url:
            name = Server(url).model
            for program in installed:
                homes[program.name].mkdir()
                program_run = ProgramRun((options.folder / program.folder).resolve(), homes[program.name], url, name)
                for row, is_right in _rows(program, program_run):
                    print(row, flush=True)
                    rows.append(row)
                    failed += not is_right
    missing = [program.name for program in programs if program not in installed]
    print(f"\nnot found in {options.folder}: {', '.join(missing)}" if missing else "")
    if options.write is not None:
        before = options.write.read_text(encoding="utf-8").partition(CLIENTS)[0].rstrip()
        options.write.write_text("\n".join([before, "", CLIENTS, HEAD, *rows, ""]), encoding="utf-8")
    return int(failed > 0)


def _rows(program: Program, program_run: ProgramRun) -> Iterator[tuple[str, bool]]:
    """Yields a row per API, and whether it succeeded."""
    version = program.version(program_run)
    try:
        found = program.task(program_run)
    except (subprocess.SubprocessError, ValueError, LookupError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()[-MAX_ERROR_CHARS:]
        yield f"| {program.name} | {version} | | FAILED: {' '.join(said.split())} |", False
        return
    for api, results in found.items():
        problems = find_problems(results)
        did = ", ".join(results) if not problems else f"FAILED: {'; '.join(problems)}"
        yield f"| {program.name} | {version} | {api} | {did} |", not problems


if __name__ == "__main__":
    raise SystemExit(run_as_program())
