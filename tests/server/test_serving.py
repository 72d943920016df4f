"""The HTTP process has its memory in large pages where the system's allocator has them."""

from __future__ import annotations

import platform

import pytest

from outrider.orchestrator.machine.http_process import LARGE_PAGES_ENV, large_pages_env


@pytest.mark.parametrize(
    ("library", "asked"),
    [
        (("glibc", "2.35"), LARGE_PAGES_ENV),
        (("glibc", "2.41.9000"), LARGE_PAGES_ENV),
        (("glibc", "2.34"), {}),
        (("", ""), {}),
        (("musl", "3.0"), {}),
    ],
)
def test_large_pages_are_enabled_only_with_a_recent_glibc(
    library: tuple[str, str], asked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: library)
    assert large_pages_env() == asked
