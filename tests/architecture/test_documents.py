"""Whoever follows a link in the documents arrives, and the log's index knows each of its entries."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/log", "models", "bench", "packaging", "tests")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def anchors(document: Path) -> list[str]:
    """What GitHub calls the headings of a document, in order."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(document: Path) -> list[str]:
    return LINK.findall(CODE.sub("`", document.read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (document.parent / path).resolve() if path else document
        assert there.exists(), f"{link}: there is no {there.relative_to(ROOT)}"
        assert not anchor or anchor in anchors(there), f"{link}: {there.relative_to(ROOT)} has no such heading"


@pytest.mark.parametrize("log", sorted((ROOT / "docs" / "log").glob("*.md")), ids=lambda path: path.stem)
def test_a_month_of_the_log_lists_its_entries_once(log: Path) -> None:
    listed = [link[1:] for link in links(log) if link.startswith("#")]
    assert sorted(listed) == sorted(anchors(log)[1:])
