"""A missing package is reported in one sentence with the extra that installs it; every extra exists."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from outrider.protocol import version
from outrider.protocol.errors import InvalidRequest

ROOT = Path(__file__).parents[2]


def test_installed_extras_are_accepted():
    for extra in set(version.EXTRA_MODULES) - {"fleet"}:  # Ray is not among the requirements of the tests
        version.require_extra(extra, "this")


def test_missing_packages_are_named_with_their_extra_and_an_alternative(monkeypatch):
    monkeypatch.setitem(version.EXTRA_MODULES, "serve", ("json", "no_such_a", "no_such_b"))
    with pytest.raises(InvalidRequest) as raised:
        version.require_extra("serve", "HTTP", otherwise="--no-http")
    assert str(raised.value) == (
        "HTTP needs no_such_a and no_such_b, which are not installed; run pip install '.[serve]' in a checkout"
        " (docs/install.md), or --no-http"
    )
    with pytest.raises(InvalidRequest, match=r"'\.\[serve\]' in a checkout"):
        version.require_extra("serve", "HTTP")


def test_every_extra_is_defined_in_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(version.EXTRA_MODULES) <= set(project["optional-dependencies"])
