"""docs/protocol.md matches the message classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.orchestrator.cli import run
from outrider.protocol.codec import MESSAGES
from tools import protocol_page
from tools.protocol_page import render_page

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def test_protocol_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == render_page(), "run: python -m tools.protocol_page"


def test_protocol_page_lists_every_message_and_field_once():
    sections = {part.partition("\n")[0]: part for part in render_page().split("\n### ")[1:]}
    for name, cls in MESSAGES.items():
        rows = [line for line in sections[name].splitlines() if line.startswith("| `")]
        assert [row.split("`")[1] for row in rows] == list(cls.__struct_fields__)


def test_every_message_and_record_has_a_description():
    assert all(not part.split("\n")[2].startswith(("|", "###")) for part in render_page().split("\n### ")[1:])
    assert {"Span", "Branch", "Timings", "WorkerStats", "SamplingParams"} <= {
        part.partition("\n")[0] for part in render_page().split("\n### ")
    }


def test_page_is_written_to_the_given_path_and_not_for_help(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        run("protocol_page", lambda: protocol_page, ["--help"])
    assert "docs/protocol.md" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert run("protocol_page", lambda: protocol_page, ["page.md"]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == render_page()
