"""Packaging beyond the wheel: the container file, the Homebrew formula, the workflows and the install page."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import outrider
from outrider.orchestrator.cli import Parser, flags, serve
from outrider.protocol.errors import InvalidRequest

ROOT = Path(__file__).parents[2]
CONTAINER = (ROOT / "packaging/Containerfile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def test_install_page_lists_every_user_extra():
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(listed) == set(EXTRAS) - {"test", "load"}


@pytest.mark.parametrize("extra", ["cpu", "cuda", "cuda13"])
def test_mlx_extras_apply_only_to_linux(extra):
    (needed,) = EXTRAS[extra]
    assert re.fullmatch(r"mlx\[\w+\]; sys_platform == 'linux'", needed)


def test_container_listens_on_all_interfaces_with_a_key_and_without_root(monkeypatch):
    monkeypatch.delenv(flags.API_KEY_VARIABLE, raising=False)
    begins = ast.literal_eval(re.search(r"^ENTRYPOINT (\[.*\])$", CONTAINER, re.MULTILINE).group(1))
    assert begins[:2] == ["outrider", "serve"]
    parser = Parser(prog="x")
    serve.add_flags(parser)
    with pytest.raises(InvalidRequest, match="OUTRIDER_API_KEY"):
        flags.http_settings_of(parser.parse(begins[2:]))
    monkeypatch.setenv(flags.API_KEY_VARIABLE, "a-key")
    settings = flags.http_settings_of(parser.parse(begins[2:]))
    assert (settings.host, f"EXPOSE {settings.port}" in CONTAINER) == ("0.0.0.0", True)
    assert f":{settings.port}/health" in CONTAINER
    assert CONTAINER.rfind("USER 10001") > CONTAINER.rfind("FROM ")


def test_dockerignore_keeps_exactly_the_package_folders():
    """All folders that are part of the wheel, and no others."""
    lines = (ROOT / "packaging/Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    rooms = {path.name for path in (ROOT / "outrider").iterdir() if path.is_symlink()} | {"outrider"}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode != 0:
        pytest.skip("this is no checkout")
    folders = {name.partition("/")[0] for name in tracked.stdout.splitlines() if "/" in name}
    assert {name for name in folders - set(lines) if not name.startswith(".")} == rooms


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_actions_are_pinned_and_permissions_are_read_only(workflow):
    text = workflow.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)", text)
    assert used and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}|\./\S+", one) for one in used)
    assert "\npermissions:\n  contents: read\n" in text
    called = set(re.findall(r"(launch/\w+\.\w+|packaging/homebrew/\w+\.py|\.ci/run)", text))
    assert all((ROOT / name).is_file() for name in called)


def test_homebrew_formula_has_a_digest_for_every_download():
    formula = (ROOT / "packaging/homebrew/outrider.rb").read_text(encoding="utf-8")
    fetched = re.findall(r'url "(\S+)"(?:, using: :nounzip)?\n\s+sha256 "([0-9a-f]{64})"', formula)
    assert len(fetched) == formula.count("url ") > 30 and "$" not in re.sub(r"#\{.*?\}", "", formula)
    names = {name.replace("_", "-") for name in re.findall(r'resource "(\S+)" do', formula)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = map(Requirement, project["dependencies"] + project["optional-dependencies"]["serve"])
    mac = {"sys_platform": "darwin", "platform_machine": "arm64", "python_version": "3.13"}
    assert {one.name for one in wanted if one.marker is None or one.marker.evaluate(mac)} | {"mlx-metal"} <= names


@pytest.mark.parametrize(("tag", "status"), [(f"v{outrider.__version__}", 0), ("v0.0.0", 1), ("main", 1)])
def test_only_the_tag_of_the_version_is_released(tag, status):
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    (step,) = [step for step in workflow["jobs"]["build"]["steps"] if step.get("name") == "The tag is the version"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]], cwd=ROOT, env={"PATH": path, "TAG": tag}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert (f"the tag is {tag}" in done.stdout) == bool(status)
