"""Takes the screenshot of the page for the README: one text in a window of a laptop's width.

outrider serve &
python -m tools.page.screenshot docs/page.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from outrider.orchestrator.cli import run_as_program
from tools.page import visit
from tools.page.agreement import DEFAULT_URL
from tools.page.browser import run_browser

PROMPT = "Write a Python function that returns the n-th Fibonacci number, and explain each line."
WIDTH, HEIGHT = 1180, 900


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, help="path of the PNG")
    parser.add_argument("--url", default=DEFAULT_URL, help="URL of a running `outrider serve`")
    parser.add_argument("--dark", action="store_true", help="use the dark colour scheme")
    parser.add_argument("--race", action="store_true", help="race AR and SSD")
    parser.add_argument("--prompt", default=PROMPT, help="prompt to fill in")
    parser.add_argument("--mode", default="auto", help="mode (default: auto)")
    parser.add_argument("--temperature", type=float, default=0.0, help="temperature (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=240, help="tokens of the text (default: 240)")
    parser.add_argument("--seed", type=int, default=7, help="seed (default: 7)")


def run(options: argparse.Namespace) -> int:
    with run_browser() as chromium:
        page = chromium.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="dark" if options.dark else "light"
        )
        page.set_default_timeout(visit.PATIENCE_MS)
        page.goto(options.url)
        visit.wait_until_ready(page)
        visit.fill_form(page, options.prompt, options.max_tokens, options.mode, options.temperature, options.seed)
        if options.race:
            page.get_by_role("button", name="Race").click()
            visit.wait_until_done(page, "The same text")
        else:
            visit.generate(page)
        page.screenshot(path=options.path, full_page=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_as_program())
