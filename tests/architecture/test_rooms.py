"""The rules of the structure: imports point in one direction, and only the engine's side imports MLX."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.syntax import nodes, parsed

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "protocol": set(),
    "grammar": {"protocol"},
    "engine": {"protocol", "grammar"},
    "drafters": {"protocol", "grammar", "engine"},
    "target_worker": {"protocol", "grammar", "engine", "drafters"},
    "draft_worker": {"protocol", "grammar", "engine", "drafters"},
    "prefill_worker": {"protocol", "engine", "drafters"},
    "orchestrator": {"protocol", "grammar"},
    "bench": {
        "protocol",
        "grammar",
        "engine",
        "drafters",
        "orchestrator",
        "target_worker",
        "draft_worker",
        "prefill_worker",
        "fleet",
    },
    "server": {"protocol", "grammar", "orchestrator"},
    "fleet": {"protocol", "grammar", "orchestrator", "server"},
    "outrider": {"protocol", "orchestrator"},
}
FOLDERS = set(MAY_IMPORT)
# Inside a folder: which of its other subfolders each subfolder may import. Each may also import the modules beside
# the subfolders, unless MAY_IMPORT_BESIDE limits them.
MAY_IMPORT_WITHIN = {
    "orchestrator": {
        "core": {"machine"},
        "front": {"pairing"},
        "client": {"machine"},
        "pairing": set(),
        "machine": {"pairing"},
        "cli": {"client", "core", "front", "machine", "pairing"},
    },
    "orchestrator/core": {"policy": set()},
    "server": {
        "model": set(),
        "answers": {"model"},
        "endpoints": {"answers", "model"},
    },
    "bench": {
        "timing": set(),
        "comparison": {"timing"},
        "commands": {"timing", "comparison"},
    },
}
MAY_IMPORT_BESIDE: dict[str, set[str]] = {"orchestrator/core/policy": set(), "server/model": set()}
IN_ORDER = {
    "drafters/coreml": (
        "layout", "package", "weights", "converter", "runtimes", "drafter", "trial", "selection",
        "doctor",
    ),
    "drafters/heads": (
        "layers", "checkpoint", "head", "pair_kv_cache", "kv_rows", "dflash", "eagle3", "mtp",
        "redrafter", "trees", "drafter", "early_exit", "load",
    ),
}  # fmt: skip
"""Folders in which each module may import only the modules listed before it."""
OUTSIDE = {"launch", "tests", "tools", "models", "docs"}
WITHOUT_MLX = ("protocol", "grammar", "orchestrator", "server", "fleet", "outrider")
MLX = {"mlx", "mlx_lm"}
# Modules that may read the wall clock, to show the time, or the times of files. Others use clocks that can't be set.
MAY_READ_WALL_CLOCKS = {
    "engine/ort/sessions.py",  # whether a file has changed
    "orchestrator/auth.py",  # whether a file has changed
    "orchestrator/pairing/chat_template.py",
    "orchestrator/pairing/pulled.py",  # whether a file has changed
    "protocol/digest.py",  # whether a cached folder was used recently
    "protocol/process.py",
    "server/answers/choices.py",
    "server/endpoints/status.py",
    "server/model/served.py",
    "server/tracing.py",
}
WALL_CLOCKS = {"time", "time_ns", "localtime", "gmtime", "strftime", "ctime", "now", "utcnow", "today", "fromtimestamp"}
BROAD = {"Exception", "BaseException"}
MAY_PRINT = ("orchestrator/cli/", "fleet/commands/", "bench/")

every_subfolder = pytest.mark.parametrize(
    ("parent", "folder"), [(parent, folder) for parent, folders in MAY_IMPORT_WITHIN.items() for folder in folders]
)
every_folder = pytest.mark.parametrize("folder", MAY_IMPORT)


@cache
def sources(folder: str) -> dict[str, str]:
    """Returns the sources of the folder's files, by their path from the root."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def modules(folder: str) -> dict[str, ast.Module]:
    return {path: parsed(ROOT / path) for path in sources(folder)}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yields the folder or package of every absolute import, including imports inside functions."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (folder_of(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield folder_of(f"{node.module}.{node.names[0].name}" if node.module == "outrider" else node.module)


def top_level(tree: ast.AST) -> Iterator[str]:
    """Yields the top-level package of every absolute import."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def folder_of(module: str) -> str:
    return module.removeprefix("outrider.").partition(".")[0]


def inner(tree: ast.AST, parent: str) -> set[str]:
    """Returns the names imported directly from the package `parent`: its subfolders, and the modules beside them."""
    named = [node for node in nodes(tree) if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module]
    below = [node.module.removeprefix(f"{parent}.") for node in named if node.module.startswith(f"{parent}.")]
    beside = {alias.name for node in named if node.module == parent for alias in node.names}
    return beside | {name.split(".")[0] for name in below}


def swallows(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches all exceptions and does not end with a `raise`."""
    return is_broad(handler) and not isinstance(handler.body[-1], ast.Raise)


def is_broad(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in BROAD) for kind in caught)


def violations(tree: ast.Module, *, may_print: bool) -> list[str]:
    """Returns the asserts, the prints and the broad handlers that do not raise, with their lines."""
    found = []
    for node in nodes(tree):
        if isinstance(node, ast.Assert):
            found.append(f"line {node.lineno}: assert")
        elif isinstance(node, ast.ExceptHandler) and swallows(node):
            found.append(f"line {node.lineno}: broad except")
        elif isinstance(node, ast.Name) and node.id == "print" and not may_print:
            found.append(f"line {node.lineno}: print")
    return found


@pytest.mark.parametrize("folder", [folder for folder in MAY_IMPORT if folder != "bench"])
def test_wall_clocks_are_read_only_to_show_the_time(folder):
    """Only MAY_READ_WALL_CLOCKS may use `time.time()` and the like, or the times of files."""
    readers = set()
    for path, tree in modules(folder).items():
        for node in nodes(tree):
            if not isinstance(node, ast.Attribute):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            of_clock = owner in ("time", "datetime", "date") and node.attr in WALL_CLOCKS
            if of_clock or node.attr in ("st_mtime", "st_ctime", "st_mtime_ns"):
                readers.add(path)
    assert readers <= MAY_READ_WALL_CLOCKS


@every_folder
def test_folders_import_only_allowed_folders(folder):
    forbidden = (FOLDERS | OUTSIDE) - {folder} - MAY_IMPORT[folder]
    assert not {path: names for path, tree in modules(folder).items() if (names := set(imported(tree)) & forbidden)}


@every_subfolder
def test_subfolders_import_only_allowed_subfolders(parent, folder):
    beside = {path.stem for path in (ROOT / parent).glob("*.py")} - {"__init__"}
    closed = beside - MAY_IMPORT_BESIDE.get(f"{parent}/{folder}", beside)
    forbidden = (set(MAY_IMPORT_WITHIN[parent]) | closed) - {folder} - MAY_IMPORT_WITHIN[parent][folder]
    name = f"outrider.{parent.replace('/', '.')}"
    found = modules(f"{parent}/{folder}")
    assert not {path: names for path, tree in found.items() if (names := forbidden & inner(tree, name))}


@pytest.mark.parametrize(("folder", "order"), IN_ORDER.items())
def test_ordered_modules_import_only_earlier_ones(folder, order):
    unordered = {Path(path).stem for path in modules(folder)} ^ {*order, "__init__"}
    assert not unordered, f"{unordered}: enter each module of {folder} in IN_ORDER, after those that it imports"
    for number, name in enumerate(order):
        forbidden = set(order[number:]) & inner(
            modules(folder)[f"{folder}/{name}.py"], f"outrider.{folder.replace('/', '.')}"
        )
        assert not forbidden, f"{folder}/{name}.py imports {forbidden}"


@pytest.mark.parametrize("folder", WITHOUT_MLX)
def test_folders_outside_the_engine_do_not_import_mlx(folder):
    assert not [path for path, tree in modules(folder).items() if set(imported(tree)) & MLX]


@every_folder
def test_modules_do_not_assert_swallow_exceptions_or_print(folder):
    found = {path: violations(tree, may_print=path.startswith(MAY_PRINT)) for path, tree in modules(folder).items()}
    assert not {path: lines for path, lines in found.items() if lines}


@every_folder
def test_every_module_has_a_docstring(folder):
    assert not [path for path, tree in modules(folder).items() if not ast.get_docstring(tree)]


LOAD_ALL = """
import importlib, outrider.__main__, pkgutil, sys
for folder in sys.argv[1:]:
    package = importlib.import_module(folder)
    for module in pkgutil.walk_packages(package.__path__, folder + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
sys.exit(", ".join(sorted({"mlx", "mlx_lm"} & set(sys.modules))) or 0)
"""


def test_importing_the_orchestrator_does_not_load_mlx():
    """Not even through another library."""
    folders = [f"outrider.{folder}" for folder in ("protocol", "orchestrator", "server", "bench.commands")]
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, *folders],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert loaded.returncode == 0, loaded.stderr


@every_folder
def test_folders_are_imported_only_as_outrider_packages(folder):
    """The wheel has no other names, and `import protocol` could import a file of the user's."""
    beside = (FOLDERS | OUTSIDE) - {"outrider"}
    assert not {path: names for path, tree in modules(folder).items() if (names := set(top_level(tree)) & beside)}


def test_every_folder_is_linked_below_outrider():
    """In a checkout, `outrider/` has a link to each folder. The wheel contains what is below `outrider/`."""
    links = {path.name: path.readlink() for path in (ROOT / "outrider").iterdir() if path.is_symlink()}
    assert links == {folder: Path("..") / folder for folder in (FOLDERS - {"outrider"}) | {"models"}}
    assert all((path.parent / "__init__.py").exists() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("source", "violation"),
    [
        ("assert x", "assert"),
        ("try: pass\nexcept: pass", "broad except"),
        ("try: pass\nexcept (ValueError, Exception): pass", "broad except"),
        ("def f():\n print(1)", "print"),
        ("try: pass\nexcept ValueError: pass", None),
        ("try: pass\nexcept BaseException:\n f()\n raise", None),
        ("try: pass\nexcept Exception:\n raise ModelError('unreadable') from None", None),
        ("try: pass\nexcept Exception:\n raise_later()", "broad except"),
    ],
)
def test_code_checks_find_each_form(source, violation):
    found = violations(ast.parse(source), may_print=False)
    assert [line.partition(": ")[2] for line in found] == ([violation] if violation else [])


def test_imports_inside_functions_are_found():
    source = "import mlx.core as mx\ndef f():\n from outrider.engine.x import y\nfrom . import z"
    assert set(imported(ast.parse(source))) == {"mlx", "engine"}
