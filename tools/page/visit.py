"""How the page is used and read: its fields, its buttons, and what stands there then. Knows the page by its labels."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Response

ORIGINS = ("prepared", "drafted", "head", "copied", "guessed", "target")
PATIENCE_MS = 120_000


def fill(page: Page, prompt: str, max_tokens: int, mode: str, temperature: float, seed: int) -> None:
    """What is to be generated."""
    page.locator("#prompt").fill(prompt)  # labelled "Message" in a conversation
    page.get_by_label("Temperature").fill(str(temperature))
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_label("Seed").fill(str(seed))
    page.get_by_label("Mode").select_option(mode)


def ready(page: Page, words: str = "ready") -> None:
    """Returns when the page says so of the server."""
    page.locator("#server", has_text=words).wait_for()


def done(page: Page, words: str = "Done") -> None:
    """Returns when the status has these words."""
    page.locator("#status", has_text=words).wait_for()


def generate(page: Page) -> Response:
    """Returns when the text is complete; the answer is the API's own, as it went over the wire."""
    with page.expect_response("**/v1/chat/completions") as answer:
        page.locator("#generate").click()
    done(page)
    return answer.value


def timings(answer: Response) -> dict[str, Any]:
    """Those that an answer ends with."""
    found: dict[str, Any] = _events(answer)[-1]["timings"]
    return found


def text(answer: Response) -> str:
    """What an answer says."""
    return "".join(choice["delta"].get("content", "") for event in _events(answer) for choice in event["choices"])


def colours(lane: Locator) -> Counter[str]:
    """How many tokens of the shown text have which."""
    return Counter({origin: lane.locator(f".text .token.{origin}").count() for origin in ORIGINS})


def legend(lane: Locator) -> Counter[str]:
    """The counts beside them."""
    return Counter({origin: int(lane.locator(f"[data-count={origin}]").inner_text()) for origin in ORIGINS})


def figure(lane: Locator, name: str) -> str:
    """One of the numbers above."""
    return lane.locator(f"[data-figure={name}]").inner_text()


def _events(answer: Response) -> list[dict[str, Any]]:
    lines = (line.removeprefix("data: ") for line in answer.text().splitlines() if line.startswith("data: {"))
    return [json.loads(line) for line in lines]
