"""The syntax of source files, parsed and listed once for all checks of a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Returns all nodes of a tree: `ast.walk` takes as long as parsing it."""
    return tuple(ast.walk(tree))
