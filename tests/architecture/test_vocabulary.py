"""Names consist of known words: the field's, in words.txt, or ours, in the glossary of docs/architecture.md.

A word that is new in the name of a public class is looked up in vLLM, SGLang, mlx-lm or the papers first. If it is
theirs or plain English it goes into words.txt; if it is ours, into the glossary, with what it means.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.architecture.syntax import parsed
from tests.architecture.test_amount import ROOT, product

WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
FIELD = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()


@cache
def classes() -> dict[str, list[Path]]:
    """Public classes of modules, and where they are defined."""
    found = defaultdict[str, list[Path]](list)
    for path in product():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT))
    return found


def words(name: str) -> set[str]:
    return {word.lower() for word in WORD.findall(name)}


def glossary() -> set[str]:
    """The words of the table's first column."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| *([^|]+?) *\|", text, re.MULTILINE)
    return {word.lower() for term in terms for word in re.findall(r"[A-Za-z]+", term)}


def test_public_class_names_use_only_known_words() -> None:
    known = {*FIELD, *glossary()}
    unknown = {name: sorted(words(name) - known) for name in classes() if words(name) - known}
    assert not unknown, f"look these up, then extend words.txt or the glossary: {unknown}"


def test_public_class_names_are_unique() -> None:
    twice = {name: list(map(str, paths)) for name, paths in classes().items() if len(paths) > 1}
    assert not twice


def test_word_list_is_sorted_and_has_no_unused_words() -> None:
    assert sorted(set(FIELD)) == FIELD
    assert not set(FIELD) - {word for name in classes() for word in words(name)}
