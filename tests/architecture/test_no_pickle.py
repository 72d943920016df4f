"""Incoming data is never executed: no module reads or writes pickles, or formats that contain them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.syntax import nodes, parsed
from tests.architecture.test_rooms import ROOT

PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "jsonpickle"}
CALLS = {"send_pyobj", "recv_pyobj", "read_pickle", "to_pickle"}
FOLDERS = (
    "protocol", "grammar", "engine", "drafters", "target_worker", "draft_worker", "prefill_worker", "orchestrator",
    "server", "fleet", "bench", "outrider", "models", "launch",
)  # fmt: skip


def find_pickles(tree: ast.Module) -> Iterator[str]:
    """Yields each use of pickles in a module, including loads by NumPy and PyTorch that may unpickle."""
    for node in nodes(tree):
        match node:
            case ast.Import(names=names) if {alias.name.split(".")[0] for alias in names} & PICKLES:
                yield f"line {node.lineno}: import"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                yield f"line {node.lineno}: import"
            case ast.Attribute(attr=name) if name in CALLS:
                yield f"line {node.lineno}: {name}"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load")) if not _has_keyword(
                node, "weights_only", True
            ):
                yield f"line {node.lineno}: torch.load"
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                yield f"line {node.value.lineno}: allow_pickle"


def _has_keyword(call: ast.Call, name: str, value: bool) -> bool:
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in call.keywords)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_uses_pickle(folder):
    trees = {path: parsed(path) for path in (ROOT / folder).rglob("*.py")}
    assert trees
    assert not {str(path): found for path, tree in trees.items() if (found := list(find_pickles(tree)))}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", 1),
        ("def f():\n from multiprocessing import reduction\n import marshal as m", 1),
        ("from cloudpickle.x import y", 1),
        ("socket.send_pyobj(1)", 1),
        ("np.load(f, allow_pickle=True)", 1),
        ("np.load(f)", 0),
        ("torch.load(f)", 1),
        ("torch.load(f, weights_only=False)", 1),
        ("torch.load(f, weights_only=True)", 0),
    ],
)
def test_pickle_check_finds_each_form(source, found):
    assert len(list(find_pickles(ast.parse(source)))) == found
