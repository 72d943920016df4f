"""The check of third-party programs reports answers that differ from the scripted model's. Needs no program."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize(
    ("agent", "system", "tool"),
    [
        ("Claude Code", "You are a coding agent.", "Write"),
        ("Qwen Code", "You are a coding agent.", "write_file"),
        ("opencode", "You are a coding agent.", "write"),
        ("Codex", "You are a coding agent.", "exec_command"),
        ("Continue", "You are an agent in the Continue CLI.", "Write"),
        ("Cline", "You are Cline, a coding agent.", "editor"),
        ("pi", "You are an assistant operating inside pi.", "write"),
    ],
)
def test_template_selects_the_write_tool_of_each_agent(tmp_path: Path, agent: str, system: str, tool: str) -> None:
    folder = write_model(tmp_path / "model", {program.name: tmp_path / program.folder for program in PROGRAMS})
    asked = [{"role": "system", "content": system}, {"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": name}} for name in ("other", tool)]

    def prompt(tools: list[dict[str, Any]] | None, messages: list[dict[str, str]]) -> str:
        return render_template(chat_template(folder) or "", messages, {}, tools=tools, answer=True, keywords={})

    assert prompt(tools, asked).endswith(f"<|{agent}|>")
    assert prompt(None, asked[1:]).endswith("<|plain|>")
    (piece,) = [one for one in tokens_of(folder) if f"{tmp_path}/{agent.lower().replace(' ', '-')}/hello.py" in one]
    assert f'"name": "{tool}"' in piece


def tokens_of(folder: Path) -> list[str]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return [token["content"] for token in tokenizer["added_tokens"]]


def test_programs_are_installed_where_the_bench_finds_them() -> None:
    for program in PROGRAMS:
        line = program.set_up("/there")
        assert f"/there/{program.folder}" in line and program.packages[0] in line
