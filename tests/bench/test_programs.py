"""The check of third-party programs reports answers that differ from the scripted model's. Needs no program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.orchestrator.pairing.chat_template import chat_template, render_template
from tests.harness.conformance.requests import GREETING, SUNNY
from tests.harness.programs.__main__ import PROGRAMS, _rows
from tests.harness.programs.program import Program, ProgramRun, Results, find_problems
from tests.harness.programs.script import write_model

RIGHT = {"stream": GREETING, "city": "Paris", "answer": SUNNY, "form": {"sure": True}, "file": True}


@pytest.mark.parametrize(
    "other", [{"stream": ""}, {"city": "Rome"}, {"answer": "I look."}, {"form": {"sure": "x"}}, {"file": False}]
)
def test_differences_from_the_model_are_reported(other: dict[str, Any]) -> None:
    assert find_problems(RIGHT) == []
    assert find_problems({**RIGHT, **other}) == [f"{name}: {value!r}" for name, value in other.items()]


def test_a_program_that_fails_has_a_row_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(run: ProgramRun) -> Results:
        run.output(["sh", "-c", "echo no such model >&2; exit 3"])
        return {}

    monkeypatch.setattr(Program, "version", lambda *_: "1")
    run = ProgramRun(tmp_path, tmp_path, "http://127.0.0.1:1", "m")
    for task, words, is_right in (
        (crash, "FAILED: no such model", False),
        (lambda _: {"messages": {"city": "Rome"}}, "FAILED: city: 'Rome'", False),
        (lambda _: {"messages": {"city": "Paris"}}, "| messages | city |", True),
    ):
        ((row, was_right),) = _rows(Program("p", ("p",), task), run)
        assert words in row and was_right is is_right


def test_template_selects_the_write_tool_of_each_agent(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", {program.name: tmp_path / program.folder for program in PROGRAMS})
    template, asked = chat_template(folder) or "", [{"role": "user", "content": "hi"}]
    for tool in ("Write", "write_file", "write", "exec_command"):
        tools = [{"type": "function", "function": {"name": name}} for name in ("other", tool)]
        assert render_template(template, asked, {}, tools=tools, answer=True, keywords={}).endswith(f"<|{tool}|>")
    assert render_template(template, asked, {}, tools=None, answer=True, keywords={}).endswith("<|plain|>")
    assert str(tmp_path / "codex" / "hello.py") in (folder / "tokenizer.json").read_text(encoding="utf-8")


def test_programs_are_installed_where_the_bench_finds_them() -> None:
    for program in PROGRAMS:
        line = program.set_up("/there")
        assert f"/there/{program.folder}" in line and program.packages[0] in line
