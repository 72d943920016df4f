"""Names of public classes consist of known words: standard ones in words.txt, or ours in docs/architecture.md.

Before you use a new word, look for it in vLLM, SGLang, mlx-lm and the papers. If they use it or it is plain English,
add it to words.txt. Otherwise add it to the glossary, with its meaning.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.architecture.syntax import parsed
from tests.architecture.test_amount import ROOT, product_files

WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
STANDARD = (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").split()


@cache
def classes() -> dict[str, list[Path]]:
    """Returns the files that define each public class, by its name."""
    found = defaultdict[str, list[Path]](list)
    for path in product_files():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT))
    return found


def words(name: str) -> set[str]:
    return {word.lower() for word in WORD.findall(name)}


def glossary() -> set[str]:
    """Returns the words in the first column of the page's tables."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| *([^|]+?) *\|", text, re.MULTILINE)
    return {word.lower() for term in terms for word in re.findall(r"[A-Za-z]+", term)}


def test_public_class_names_use_only_known_words() -> None:
    known = {*STANDARD, *glossary()}
    unknown = {name: sorted(words(name) - known) for name in classes() if words(name) - known}
    assert not unknown, f"look these up, then extend words.txt or the glossary: {unknown}"


def test_public_class_names_are_unique() -> None:
    twice = {name: list(map(str, paths)) for name, paths in classes().items() if len(paths) > 1}
    assert not twice


def test_word_list_is_sorted_and_has_no_unused_words() -> None:
    assert sorted(set(STANDARD)) == STANDARD
    assert not set(STANDARD) - {word for name in classes() for word in words(name)}
