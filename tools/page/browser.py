"""A headless Chromium, driven by the `playwright` package, which the `test` extra has."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from outrider.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSER_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None."""
    return next((path for name in BROWSER_NAMES if (path := shutil.which(name))), None)


@contextmanager
def run_browser(**options: Any) -> Iterator[Browser]:
    """Runs a headless browser.

    Raises:
        InvalidRequest: no browser or no playwright is installed.
    """
    path = find_browser()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise InvalidRequest("playwright is not installed; run: pip install playwright") from None
    if path is None:
        raise InvalidRequest(f"no browser is installed; expected {' or '.join(BROWSER_NAMES)} on the path")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=list(FLAGS), **options)
        try:
            yield opened
        finally:
            opened.close()
