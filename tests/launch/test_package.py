"""The contents of the wheel, which are the same when it is built from the checkout and from the sdist.

Weights are empty files here, which saves the time to compress them. `launch/check_wheel.sh` installs the real wheel and
runs it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import outrider

ROOT = Path(__file__).parents[2]
DRAFT = Path("models/smollm2/draft")
MAX_WHEEL_BYTES = 12_000_000
EXCLUDED = shutil.ignore_patterns(".*", "*.safetensors", "__pycache__", "*.egg-info", "build", "dist", "out")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"


def build(kind: str, tree: Path, where: Path) -> Path:
    """Builds a `kind` (wheel or sdist) of `tree` in the new folder `where` without a network, and returns its path."""
    where.mkdir()
    done = subprocess.run([sys.executable, "-c", BUILD, kind, str(where)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0 and "Package would be ignored" not in done.stderr, done.stderr
    (built,) = where.iterdir()
    return built


def read_wheel(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The contents of the wheel built from the checkout, and of the wheel built from its sdist."""
    folder = tmp_path_factory.mktemp("package")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=EXCLUDED)
    (tree / DRAFT / "model.safetensors").touch()
    sdist = build("sdist", tree, folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return read_wheel(build("wheel", tree, folder / "wheel")), read_wheel(build("wheel", unpacked, folder / "again"))


def test_one_name_goes_into_site_packages(wheels):
    names = {name.partition("/")[0] for name in wheels[0]}
    assert {name for name in names if not name.endswith(".dist-info")} == {"outrider"}


def test_wheel_contains_default_draft_prompts_page_and_types(wheels):
    found, bench = set(wheels[0]), ROOT / "bench"
    texts = {f"outrider/bench/{path.relative_to(bench)}" for path in (bench / "prompts").rglob("*.*")}
    page = {f"outrider/server/page/{path.name}" for path in (ROOT / "server" / "page").iterdir()}
    draft = {f"outrider/{DRAFT / name}" for name in ("config.json", "model.safetensors", "training.json")}
    assert len(page) > 3 and not (draft | texts | page | {"outrider/py.typed", "outrider/server/docs.html"}) - found


def test_the_wheel_is_small_and_leaves_out_the_tiny_pair(wheels, tmp_path):
    with zipfile.ZipFile(tmp_path / "again.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in wheels[0].items():
            archive.writestr(name, content)
        archive.write(ROOT / DRAFT / "model.safetensors")  # empty in the wheels here
    assert (tmp_path / "again.whl").stat().st_size < MAX_WHEEL_BYTES
    assert {name.split("/")[2] for name in wheels[0] if name.startswith("outrider/models/")} == {"smollm2"}


def test_wheel_contains_exactly_the_modules_of_the_package(wheels):
    folders = [path for path in (ROOT / "outrider").iterdir() if path.is_symlink() and path.name != "models"]
    modules = {f"outrider/{room.name}/{path.relative_to(room)}" for room in folders for path in room.rglob("*.py")}
    top_level = {"outrider/__init__.py", "outrider/__main__.py"}
    assert {name for name in wheels[0] if name.endswith(".py")} == modules | top_level


def test_the_sdist_builds_the_same_wheel(wheels):
    assert wheels[0] == wheels[1]


@pytest.mark.parametrize("name", ["LocalCluster", "Client", "SamplingParams", "InvalidRequest", "OutriderError"])
def test_main_classes_are_exported_by_outrider(name):
    assert name in outrider.__all__ and getattr(outrider, name).__name__ == name


def test_public_names_resolve_and_others_raise_attribute_error():
    assert all(getattr(outrider, name) is not None for name in outrider.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Sampling'"):
        outrider.Sampling  # noqa: B018


def test_program_beside_a_clone_imports_the_installed_package(tmp_path):
    """In the folder in which `git clone` was run, `outrider` is also the name of the clone's folder."""
    (tmp_path / "outrider" / "orchestrator").mkdir(parents=True)
    (tmp_path / "program.py").write_text("from outrider import LocalCluster")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_folders_are_importable_by_their_own_names_in_a_checkout():
    """In the checkout's root, `orchestrator` has the same classes as `outrider.orchestrator`."""
    script = "import outrider; from orchestrator import Client; raise SystemExit(Client is not outrider.Client)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
