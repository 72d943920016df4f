"""Links in the documents resolve, names in them exist, and the index of each log page lists all of its entries."""

from __future__ import annotations

import ast
import dataclasses
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from outrider.orchestrator.settings import ServeSettings
from tests.architecture.syntax import parsed
from tests.architecture.test_amount import product_files
from tools import messages

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/design", "docs/log", "models", "bench", "packaging", "tests")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
WORD = re.compile(r"\w+")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
NAME_IN_FILE = re.compile(r"`([A-Za-z_][\w.]*)` (?:in |\()`([\w/]+\.py)`")
ATTRIBUTE = re.compile(r"`([A-Z][a-z]\w*)\.(?!gguf)([a-z]\w*)")
PROGRAM = re.compile(r'python"? (?:-P )?-m (?:outrider\.)?((?:tools|tests|drafters|models)\b[\w.]*)([^`\n|]*)')
NAME_AFTER_FILE = re.compile(r"`([\w/]+\.py)` \(`([A-Za-z_][\w.]*)`")


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Returns the sorted words in the project's code and in the paths of its files."""
    folders = (
        path
        for path in ROOT.iterdir()
        if path.is_dir() and path.name not in ("outrider", "docs") and path.name[0] != "."
    )
    files = [file for folder in folders for file in folder.rglob("*.py") if "node_modules" not in file.parts]
    found = set[str]()
    for file in files:
        found.update(WORD.findall(str(file.relative_to(ROOT))), WORD.findall(file.read_text()))
    return sorted(found)


@pytest.fixture(autouse=True, scope="module")
def cache_messages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "find_messages", cache(messages.find_messages))
        yield


def anchors(document: Path) -> list[str]:
    """Returns GitHub's anchors for the headings of a document, in order."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def links(document: Path) -> list[str]:
    return LINK.findall(CODE.sub("`", document.read_text()))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_resolves(document: Path) -> None:
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        assert not anchor or anchor in anchors(target), f"{link}: {target.relative_to(ROOT)} has no such heading"


NOT_HISTORY = [path for path in DOCUMENTS if "log" not in str(path.relative_to(ROOT)).lower()]


@pytest.mark.parametrize("document", NOT_HISTORY, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_constants_tests_and_modules_exist(document: Path, names: list[str]) -> None:
    """A name followed by `...` is a prefix. The log and the changelog may name things that were removed later."""
    text = document.read_text()
    named = re.findall(r"`(?!OTEL_)([A-Z]+_[A-Z_]+|test_[a-z_]+)(?:\.\.\.)?`", text)
    matches = {name: names[at] if (at := bisect_left(names, name)) < len(names) else "" for name in named}
    assert [name for name, word in matches.items() if not word.startswith(name)] == []
    for module in re.findall(r"python -m (?:outrider\.)?((?:tools|tests|drafters|models)\b[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), f"there is no module {module}"


@pytest.mark.parametrize(
    "path", [*NOT_HISTORY, *sorted((ROOT / "launch").glob("*.sh"))], ids=lambda path: str(path.relative_to(ROOT))
)
def test_programs_have_the_flags_that_their_commands_give(path: Path) -> None:
    """Arguments after a separate `--` belong to another command and are not checked."""
    settings = {field.name for field in dataclasses.fields(ServeSettings)}
    for module, rest in PROGRAM.findall(re.sub(r"\s*\\\n\s*", " ", path.read_text())):
        base = ROOT / module.replace(".", "/")
        files = [base.with_suffix(".py")] if base.with_suffix(".py").exists() else list(base.rglob("*.py"))
        source = "".join(file.read_text() for file in files)
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest.partition(" -- ")[0]):
            known = f'"{flag}"' in source or flag[2:].replace("-", "_") in settings
            assert known, f"{module} has no flag {flag}"


@pytest.mark.parametrize("document", NOT_HISTORY, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_modules_have_the_names_that_documents_look_for_there(document: Path) -> None:
    text = re.sub(r"\s+", " ", document.read_text())
    named = {*NAME_IN_FILE.findall(text), *((name, file) for file, name in NAME_AFTER_FILE.findall(text))}
    for name, file in sorted(named):
        modules = [path for path in ROOT.rglob(Path(file).name) if f"/{path}".endswith(f"/{file}")]
        words = {word for path in modules for word in WORD.findall(path.read_text())}
        assert name.rpartition(".")[2] in words, f"`{name}` is not in {file}"


@pytest.fixture(scope="module")
def classes() -> dict[str, set[str]]:
    """Returns the identifiers used in each class of the product and in its base classes, by the name of the class."""
    found, bases = dict[str, set[str]](), dict[str, list[str]]()
    for path in product_files():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                inner = list(ast.walk(node))
                found[node.name] = {
                    getattr(part, key) for part in inner for key in ("id", "attr", "name") if hasattr(part, key)
                }
                bases[node.name] = [word for base in node.bases for word in WORD.findall(ast.unparse(base))]
    for name in found:
        found[name] = found[name].union(*(found.get(base, ()) for base in bases[name]))
    return found


@pytest.mark.parametrize("document", NOT_HISTORY, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_classes_have_the_named_attributes(document: Path, classes: dict[str, set[str]]) -> None:
    for name, attribute in ATTRIBUTE.findall(document.read_text()):
        assert attribute in classes[name], f"{name} has no {attribute}"


@pytest.mark.parametrize("document", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.stem)
def test_commands_have_no_comment_and_no_variable_of_several_words(document: Path) -> None:
    """In zsh, the shell of macOS, a comment in an interactive command becomes arguments, and `$X` a single argument."""
    for line in document.read_text().splitlines():
        assert not re.match(r"(    |\w+\$ +)?[\w~./-]*(outrider|launch/|python|pip|brew|scp)\b.* # ", line), line
        assert not re.search(r"`outrider [^`]*\s\$\w", line), line


@pytest.mark.parametrize("log", sorted((ROOT / "docs" / "log").glob("*.md")), ids=lambda path: path.stem)
def test_log_page_index_lists_each_entry_once(log: Path) -> None:
    listed = [link[1:] for link in links(log) if link.startswith("#")]
    assert sorted(listed) == sorted(anchors(log)[1:])


def test_messages_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "messages.md").read_text()
    assert written == messages.render_page(), "run: python -m tools.messages --write docs/messages.md"


def test_collected_messages_include_errors_help_log_lines_and_notes() -> None:
    """One example of each kind: an error, a flag's help, a log line, a note, and a text of the chat page."""
    found = {(message.kind, message.text) for message in messages.find_messages()}
    for kind, words in (
        ("errors", "{name} is {plain_repr(value)}; expected True or False"),
        ("help", "print the version and exit"),
        ("log", "dropped a heartbeat frame: %s"),
        ("other", "speculation is off: there is no drafter"),
        ("other", "The colour of each token shows where it came from:"),
    ):
        assert (kind, words) in found
    assert not [text for _, text in found if text.startswith("The Python client")]  # a docstring
