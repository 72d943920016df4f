"""A program under test: how it is installed and run, and the expected results."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness.conformance.requests import GREETING, SUNNY

SECONDS = 100
Results = Mapping[str, Mapping[str, object]]
"""The results of a task by API and part: stream, city, answer, form, parts or file."""


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """A program's folder and the server to use. `home`: an empty folder, its working directory and HOME."""

    folder: Path
    home: Path
    url: str
    model: str

    def output(self, line: list[str], **environment: str) -> str:
        """Returns the output of a command, run with a minimal environment and these variables.

        Raises:
            CalledProcessError, TimeoutExpired
        """
        bare = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", "NO_COLOR": "1"}
        return subprocess.run(
            line, cwd=self.home, env=bare | environment, capture_output=True, text=True, timeout=SECONDS, check=True,
            stdin=subprocess.DEVNULL,
        ).stdout  # fmt: skip

    def command(self, name: str) -> str:
        """Returns the path of one of the program's commands."""
        found = [self.folder / "bin" / name, self.folder / "node_modules" / ".bin" / name]
        return str(next((path for path in found if path.exists()), found[0]))


@dataclass(frozen=True, slots=True)
class Program:
    """`packages`: for pip or npm, the program's own first. `task` runs it; `version` returns its version."""

    name: str
    packages: tuple[str, ...]
    task: Callable[[ProgramRun], Results]
    is_npm: bool = False

    @property
    def folder(self) -> str:
        return self.name.lower().replace(" ", "-")

    def set_up(self, home: str) -> str:
        """Returns the command that installs it below `home`."""
        folder = f"{home}/{self.folder}"
        if self.is_npm:
            return f"npm install --prefix {folder} {' '.join(self.packages)}"
        return f"python -m venv {folder} && {folder}/bin/pip install {' '.join(self.packages)}"

    def is_installed_in(self, folder: Path) -> bool:
        return (folder / ("node_modules" if self.is_npm else "bin/python")).exists()

    def version(self, run: ProgramRun) -> str:
        """Returns the version of its own package."""
        package = self.packages[0].partition("[")[0]
        if self.is_npm:
            described = run.folder / "node_modules" / package / "package.json"
            return str(json.loads(described.read_text(encoding="utf-8"))["version"])
        ask = f"import importlib.metadata as m; print(m.version({package!r}))"
        return run.output([run.command("python"), "-c", ask]).strip()


def find_problems(results: Mapping[str, object]) -> list[str]:
    """Returns the parts of a task with unexpected results."""
    expected: dict[str, Callable[[object], bool]] = {
        "stream": lambda text: text == GREETING,
        "city": lambda city: city == "Paris",
        "answer": lambda text: text == SUNNY,
        "form": _is_form,
        "parts": _is_form,
        "file": bool,
    }
    return [f"{name}: {value!r}" for name, value in results.items() if not expected[name](value)]


def _is_form(form: object) -> bool:
    return isinstance(form, dict) and isinstance(form.get("sure"), bool)
