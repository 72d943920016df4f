"""Checks that the page's colours and figures agree with the API, for requests of every mode in a real browser.

    outrider serve &
    python -m tools.page.agreement --requests 50

For each request the page's coloured tokens are counted and compared with the `timings` of the answer: tokens, accepted
draft tokens, and hits; and the shown text is compared with the text of the answer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from outrider.orchestrator.cli import run_as_program
from tests.harness.default_model import mixed_prompts
from tools.page import visit
from tools.page.browser import run_browser

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Response

MODES = ("ssd", "auto", "sd", "ar")
TEMPERATURES = (0.0, 0.8)
DEFAULT_URL = "http://127.0.0.1:8080"


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help="URL of a running `outrider serve`")
    parser.add_argument("--requests", type=int, default=50, help="number of requests (default: 50)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens per text (default: 64)")


def run(options: argparse.Namespace) -> int:
    wrong = 0
    total: Counter[str] = Counter()
    with run_browser() as chromium:
        page = chromium.new_page()
        page.set_default_timeout(visit.PATIENCE_MS)
        page.goto(options.url)
        visit.wait_until_ready(page)
        for number, prompt in enumerate(mixed_prompts(options.requests)):
            mode, temperature = MODES[number % len(MODES)], TEMPERATURES[number // len(MODES) % len(TEMPERATURES)]
            visit.fill_form(page, prompt.text, options.max_tokens, mode, temperature, number)
            answer, lane = visit.generate(page), page.locator(".lane")
            total += visit.count_colours(lane)
            if differences := find_differences(lane, answer):
                wrong += 1
                print(f"{prompt.name}, {mode}, T = {temperature}, seed {number}: {'; '.join(differences)}")
    counts = ", ".join(f"{count} {origin}" for origin, count in total.items())
    print(f"{options.requests} requests, {total.total()} tokens ({counts}): {options.requests - wrong} agree")
    return 1 if wrong else 0


def find_differences(lane: Locator, answer: Response) -> list[str]:
    """Returns the values that the page shows differently from the API."""
    times, seen = visit.read_timings(answer), visit.count_colours(lane)
    looked_up = times["cache_hits"] + times["cache_misses"]
    pairs = {
        "tokens": (seen.total(), times["predicted_n"]),
        "drafted tokens": (seen.total() - seen["target"], times["draft_n_accepted"]),
        "counts": (visit.read_legend(lane), seen),
        "hits": (
            visit.read_figure(lane, "hits"),
            f"{times['cache_hits']} of {looked_up}" if looked_up else "\N{EN DASH}",
        ),
        "rate": (visit.read_figure(lane, "rate"), f"{times['predicted_per_second']:.1f}"),
        "text": (lane.locator(".text").text_content(), visit.read_text(answer)),
    }
    return [f"{name} {shown}, expected {sent}" for name, (shown, sent) in pairs.items() if shown != sent]


if __name__ == "__main__":
    raise SystemExit(run_as_program())
