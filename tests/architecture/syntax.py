"""Parsed source files, cached for all checks that run in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Returns all nodes of a tree, cached because `ast.walk` takes as long as parsing does."""
    return tuple(ast.walk(tree))
