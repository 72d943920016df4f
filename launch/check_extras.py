"""Resolves every extra for every supported platform with pip, from wheels only, and prints the results.

    python launch/check_extras.py [--extra NAME] [--python 3.11]

pip can download for other platforms, but evaluates markers such as `sys_platform` for the machine it runs on; here it
evaluates them for the other platform. Needs the package index and a pip that reads only metadata (25 and newer; older
ones download all); installs nothing. The exit code is 1 if an extra can't be resolved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).parents[1]
MIN_PIP = 25
# Runs pip with the markers of the machine that the first argument describes.
PIP = """
import json, runpy, sys
from pip._vendor.packaging import markers
there = json.loads(sys.argv.pop(1))
here = markers.default_environment()
markers.default_environment = lambda: {**here, **there}
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__")
"""


@dataclass(frozen=True, slots=True)
class Platform:
    """A platform; `tags`: the platform tags that its pip accepts, newest first."""

    name: str
    tags: tuple[str, ...]
    system: str
    machine: str

    def markers(self, python: str) -> dict[str, str]:
        return {
            "sys_platform": self.system,
            "platform_system": self.system.capitalize(),
            "platform_machine": self.machine,
            "python_version": python,
            "python_full_version": f"{python}.0",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
        }


def _manylinux(machine: str) -> tuple[str, ...]:
    return (*(f"manylinux_2_{minor}_{machine}" for minor in range(35, 16, -1)), f"manylinux2014_{machine}")


PLATFORMS = (  # the oldest of each that docs/install.md names
    Platform("macOS arm64", tuple(f"macosx_{major}_0_arm64" for major in range(14, 10, -1)), "darwin", "arm64"),
    Platform("Linux x86-64", _manylinux("x86_64"), "linux", "x86_64"),
    Platform("Linux arm64", _manylinux("aarch64"), "linux", "aarch64"),
)


@dataclass(frozen=True, slots=True)
class Package:
    """A package to download; `digest`: the SHA-256 of the file, or "" for this checkout."""

    address: str
    digest: str


@dataclass(frozen=True, slots=True)
class Found:
    """The packages that pip would install, by name; `fault`: its error."""

    packages: Mapping[str, Package]
    fault: str = ""


def resolve(extra: str, platform: Platform, python: str) -> Found:
    """Resolves an extra; "": the core only."""
    what = f"{ROOT}[{extra}]" if extra else str(ROOT)
    tags = [word for tag in platform.tags for word in ("--platform", tag)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        where = ["--target", folder, "--report", str(report)]
        said = [sys.executable, "-c", PIP, json.dumps(platform.markers(python)), "install", "--dry-run", "--quiet"]
        said += [*where, "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *tags, what]
        done = subprocess.run(said, capture_output=True, text=True, check=False, env=public())
        if done.returncode != 0:
            return Found({}, done.stderr.strip().splitlines()[-1])
        installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    return Found({one["metadata"]["name"]: _package(one["download_info"]) for one in installs})


def public() -> dict[str, str]:
    """Returns this environment without local indexes, since every user must be able to find the packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}


def _package(download: Mapping[str, Any]) -> Package:
    digest = download.get("archive_info", {}).get("hashes", {}).get("sha256", "")
    return Package(download["url"], digest)


def megabytes(addresses: Sequence[str]) -> float:
    """Returns the total size of downloads, in MB."""
    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(_size, addresses)) / 1e6


def _size(address: str) -> int:
    if not address.startswith("http"):  # this checkout
        return 0
    try:
        with urlopen(Request(address, method="HEAD"), timeout=30) as answer:
            return int(answer.headers.get("Content-Length", 0))
    except URLError:
        return 0


def rows(extras: Sequence[str], python: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Returns the table cells of each extra, and the failures."""
    core: list[Found] = []
    for extra in ("", *extras):
        with ThreadPoolExecutor(len(PLATFORMS)) as pool:
            found = list(pool.map(lambda platform, extra=extra: resolve(extra, platform, python), PLATFORMS))
        core = core or found
        cells = [_cell(one, base if extra else None) for one, base in zip(found, core, strict=True)]
        named = zip(PLATFORMS, found, strict=True)
        yield extra or "(core)", cells, [f"{extra or 'core'} on {p.name}: {one.fault}" for p, one in named if one.fault]


def _cell(found: Found, core: Found | None) -> str:
    if found.fault:
        return "no"
    known = core.packages if core is not None else {}
    brought = [package.address for name, package in found.packages.items() if name not in known]
    return f"{len(brought)}, {megabytes(brought):.0f} MB"


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    parser = argparse.ArgumentParser(description="Resolves every extra for every platform.")
    parser.add_argument("--extra", action="append", choices=list(project["optional-dependencies"]))
    parser.add_argument("--python", default="3.11")
    options = parser.parse_args()
    if int(version("pip").split(".")[0]) < MIN_PIP:
        print(f"pip {version('pip')} would download all packages; run python -m pip install -U pip", file=sys.stderr)
        return 1
    print(f"Python {options.python}: packages of each, in addition to the core's, and their download\n")
    print(f"| extra | {' | '.join(platform.name for platform in PLATFORMS)} |")
    print(f"|---|{'---|' * len(PLATFORMS)}", flush=True)
    failed = []
    for extra, cells, faults in rows(options.extra or list(project["optional-dependencies"]), options.python):
        print(f"| {extra} | {' | '.join(cells)} |", flush=True)
        failed += faults
    print("\n".join(["", *failed]) if failed else "\nall of them resolve")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
