"""Writes docs/messages.md, a page for review with all messages that the product shows to users.

    python -m tools.messages --write docs/messages.md

The messages are gathered from the source's syntax tree: string literals of at least three words, except docstrings.
Literals in `raise` are errors, arguments like `help=` are help, arguments of a logger are log lines; the others are
notes, labels and parts of sentences, if they have enough words beside their values. `{...}` stands for a value.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from outrider.orchestrator.cli import run_as_program

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "outrider", "protocol", "grammar", "engine", "drafters", "target_worker", "draft_worker", "prefill_worker",
    "orchestrator", "server", "fleet", "bench",
)  # fmt: skip
KINDS = ("errors", "help", "log", "other")
HELP_KEYWORDS = ("help", "description", "epilog", "usage", "title")
LOG_METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log")
SENTENCE = re.compile(r"[A-Za-z]{2,}[^A-Za-z]+ [^\n]*\b[a-z]{2,}|[A-Za-z]{2,} [^\n]*\b[a-z]+ ")
VALUE = re.compile(r"\{(?:[^{}]|\{[^{}]*\})*\}")
HEAD = """# Messages

This page lists all errors, help texts, log lines and notes, so that they can be searched and reviewed. `{...}` stands
for a value. Each error should say what was wrong, what was expected and what to do. `python -m tools.messages --write
docs/messages.md` writes the page from the source; a test compares both.
"""


@dataclass(frozen=True, slots=True, order=True)
class Message:
    """A message, or a part of one."""

    file: str
    line: int
    kind: str
    text: str


def find_messages() -> list[Message]:
    """Returns all messages in the order of the source."""
    found: list[Message] = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):  # `outrider/` has links to the other folders
                found += _find_in_module(path)
    return found + sorted(_find_in_page(ROOT / "server" / "page" / "index.html"))


def render_page() -> str:
    """Returns the page."""
    found, lines = find_messages(), [HEAD]
    for kind in KINDS:
        lines.append(f"\n## {kind.capitalize()}\n")
        last = ""
        for message in (one for one in found if one.kind == kind):
            if message.file != last:
                lines.append(f"\n`{message.file}`\n" if last else f"`{message.file}`\n")
                last = message.file
            lines.append(f"- {message.text}")
    return "\n".join(lines) + "\n"


def _find_in_module(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text())
    name = str(path.relative_to(ROOT))
    yield from sorted({Message(name, line, kind, text) for line, kind, text in _find_literals(tree, "other")})


def _find_literals(node: ast.AST, kind: str) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.Constant | ast.JoinedStr):
        text = _literal_text(node)
        if SENTENCE.search(VALUE.sub("{}", text) if kind == "other" else text):
            yield node.lineno, kind, " ".join(text.split())
        return
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):  # a docstring
            yield from _find_literals(child, _message_kind(child, kind))


def _message_kind(node: ast.AST, outer: str) -> str:
    match node:
        case ast.Raise():
            return "errors"
        case ast.keyword(arg=name) if name in HELP_KEYWORDS:
            return "help"
        case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger"), attr=name)) if name in LOG_METHODS:
            return "log"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name.endswith(
            ("Error", "Fault", "Busy", "Request", "Stopped", "unsupported")
        ):
            return "errors"
    return outer


def _literal_text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{ast.unparse(part.value)}}}"
        for part in node.values
        if isinstance(part, ast.Constant | ast.FormattedValue)
    )


class _TextCollector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str]] = []

    def handle_data(self, data: str) -> None:
        if " " in data.strip():
            self.found.append((self.getpos()[0], " ".join(data.split())))


def _find_in_page(path: Path) -> Iterator[Message]:
    reader = _TextCollector()
    reader.feed(path.read_text())
    for line, text in reader.found:
        yield Message(str(path.relative_to(ROOT)), line, "other", text)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", type=Path, metavar="PATH", help="write the page to this file (default: print it)")


def run(options: argparse.Namespace) -> int:
    if options.write is None:
        print(render_page(), end="")
    else:
        options.write.write_text(render_page())
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
