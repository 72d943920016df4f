"""Each record of a request in the core is written by one module (docs/architecture.md, "State and its writers")."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import pytest

from tests.architecture.test_rooms import modules

REQUEST = "orchestrator/core/request.py"
WRITERS = {
    "sequence": "scheduler",
    "round": "next_round",
    "draft": "draft_pool",
    "cache": "draft_pool",
    "state": "draft_pool",  # of one drafter
    "planning": "planner",
}
"""The module that writes each record, by the name of the record in `Request` and in the code."""
CONTAINER_CHANGES = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "remove", "discard", "clear"}


@cache
def mutators() -> set[str]:
    """Returns the names of the methods that change a record: those that return None."""
    functions = [node for node in ast.walk(modules("orchestrator/core")[REQUEST]) if isinstance(node, ast.FunctionDef)]
    return {one.name for one in functions if isinstance(one.returns, ast.Constant) and one.returns.value is None}


def changed_objects(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the objects that assignments, deletions and calls of mutators change."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                target: ast.expr = node
            case ast.Call(func=ast.Attribute(attr=name)) if name in mutators() | CONTAINER_CHANGES:
                target = node.func
            case _:
                continue
        while isinstance(target, ast.Subscript | ast.Attribute):
            target = target.value
            yield target


def changed_records(tree: ast.AST) -> set[str]:
    """Returns the names of the records that a module changes."""
    names = {getattr(target, "attr", getattr(target, "id", "")).rstrip("_") for target in changed_objects(tree)}
    return names & set(WRITERS)


def test_each_record_of_a_request_has_one_writer() -> None:
    found = defaultdict[str, set[str]](set)
    for path, tree in modules("orchestrator/core").items():
        for record in changed_records(tree) if path != REQUEST else ():
            found[record].add(path.removeprefix("orchestrator/core/").removesuffix(".py"))
    assert found == {record: {writer} for record, writer in WRITERS.items()}


@pytest.mark.parametrize(
    ("source", "record"),
    [
        ("request.round.halted = True", "round"),
        ("round_.number += 1", "round"),
        ("a, request.sequence.last_heard_ns = 1, 2", "sequence"),
        ("request.sequence.append(tokens, 0)", "sequence"),
        ("del draft.drafters[name]", "draft"),
        ("draft.losses.pop(name)", "draft"),
        ("state.assign(1, range(2), 3, 4)", "state"),
        ("number = request.round.number", None),
        ("round_ = request.round", None),
        ("request.draft.cache.lookup(committed)", None),
    ],
)
def test_changes_of_records_are_found(source: str, record: str | None) -> None:
    assert (record in changed_records(ast.parse(source))) if record else not changed_records(ast.parse(source))
