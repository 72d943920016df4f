"""The HTTP process has its memory in large pages where the system's allocator has them."""

from __future__ import annotations

import os

import pytest

from outrider.orchestrator.machine.http_process import GLIBC_CONFSTR, LARGE_PAGES_ENV, large_pages_env


@pytest.mark.parametrize(
    ("system", "asked"),
    [
        ("glibc 2.35", LARGE_PAGES_ENV),
        ("glibc 2.41.9000", LARGE_PAGES_ENV),
        ("glibc 2.34", {}),
        (None, {}),
        ("musl 3.0", {}),
    ],
)
def test_large_pages_are_enabled_only_with_a_recent_glibc(
    system: str | None, asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr_names", {GLIBC_CONFSTR: 2})
    monkeypatch.setattr(os, "confstr", lambda _: system)
    assert large_pages_env() == asked


def test_large_pages_are_off_when_the_c_library_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr_names", {})
    assert large_pages_env() == {}
