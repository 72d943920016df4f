"""The size of the product: within the ceiling in CHANGELOG.md, and no small module with a single importer."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.architecture.syntax import nodes, parsed

ROOT = Path(__file__).parents[2]
ROOMS = sorted(path.name for path in (ROOT / "outrider").iterdir() if path.is_symlink() and path.name != "models")
"""The folders that the wheel installs besides `outrider/` itself. It also installs the models, which have no code."""
CEILING = re.compile(r"^Product size: at most ([\d,]+) lines in ([\d,]+) files\.$", re.MULTILINE)
SMALL = 40


def product_files() -> list[Path]:
    found = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    return sorted([*found, *(ROOT / "outrider").glob("*.py")])


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["outrider", *(part for part in parts if part not in ("outrider", "__init__"))])


def imported(path: Path) -> set[str]:
    """Returns the names of imported modules and of the names imported from them, which may be modules too."""
    names: set[str] = set()
    for node in nodes(parsed(path)):
        match node:
            case ast.Import(names=aliases):
                names.update(alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), level=0, names=aliases):
                names.update([module, *(f"{module}.{alias.name}" for alias in aliases)])
    return names


def test_product_size_is_within_the_changelog_limit() -> None:
    lines, files = (int(number.replace(",", "")) for number in CEILING.findall((ROOT / "CHANGELOG.md").read_text())[0])
    modules = product_files()
    assert len(modules) <= files, f"{len(modules)} files; merge some, or say why in CHANGELOG.md and raise its ceiling"
    count = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules)
    assert count <= lines, f"{count} lines; remove some, or say why in CHANGELOG.md and raise its ceiling"


def test_small_modules_have_more_than_one_importer() -> None:
    """A small module with one importer belongs in that importer, unless it is an `__init__.py` or a `__main__.py`."""
    importers = defaultdict[str, set[str]](set)
    modules = {module_of(path): path for path in product_files()}
    for name, path in modules.items():
        for other in imported(path) & modules.keys() - {name}:
            importers[other].add(name)
    small = {
        str(path.relative_to(ROOT)): sorted(importers[name])
        for name, path in modules.items()
        if path.name not in ("__init__.py", "__main__.py")
        and len(path.read_text(encoding="utf-8").splitlines()) < SMALL
        and len(importers[name]) == 1
    }
    assert not small, f"modules of fewer than {SMALL} lines with one importer: {small}"
