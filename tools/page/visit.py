"""Operates the page in a browser by its labels: fills its fields, presses its buttons, and reads its contents."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Response

ORIGINS = ("prepared", "drafted", "head", "copied", "guessed", "target")
PATIENCE_MS = 120_000


def fill_form(page: Page, prompt: str, max_tokens: int, mode: str, temperature: float, seed: int) -> None:
    """Fills in the form."""
    page.locator("#prompt").fill(prompt)  # labelled "Message" in a conversation
    page.get_by_label("Temperature").fill(str(temperature))
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Seed").fill(str(seed))
    page.get_by_label("Mode").select_option(mode)


def wait_until_ready(page: Page, words: str = "ready") -> None:
    """Waits until the page's server status has these words."""
    page.locator("#server", has_text=words).wait_for()


def wait_until_done(page: Page, words: str = "Done") -> None:
    """Waits until the page's request status has these words."""
    page.locator("#status", has_text=words).wait_for()


def generate(page: Page) -> Response:
    """Generates a text, and returns the API's response when the text is complete."""
    with page.expect_response("**/v1/chat/completions") as answer:
        page.locator("#generate").click()
    wait_until_done(page)
    return answer.value


def read_timings(answer: Response) -> dict[str, Any]:
    """Returns the timings at the end of a response."""
    last: dict[str, Any] = _events(answer)[-1]["timings"]
    return last


def read_text(answer: Response) -> str:
    """Returns the text of a response."""
    return "".join(choice["delta"].get("content", "") for event in _events(answer) for choice in event["choices"])


def count_colours(lane: Locator) -> Counter[str]:
    """Returns the number of shown tokens by origin, which sets their colour."""
    return Counter({origin: lane.locator(f".said :is(.text, .thought) .token.{origin}").count() for origin in ORIGINS})


def read_legend(lane: Locator) -> Counter[str]:
    """Returns the counts that the page's legend shows by origin."""
    return Counter({origin: int(lane.locator(f"[data-count={origin}]").inner_text()) for origin in ORIGINS})


def read_figure(lane: Locator, name: str) -> str:
    """Returns one of the figures above the text."""
    return lane.locator(f"[data-figure={name}]").inner_text()


def _events(answer: Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in answer.text().splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]
