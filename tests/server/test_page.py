"""The live page in a real browser shows what the API returns, and is accessible."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from outrider import SamplingParams
from tests.server.running_server import KEY, RunningServer
from tests.suspend import pid_of, suspended, throttled
from tools.page import visit as visiting
from tools.page.agreement import find_differences
from tools.page.browser import find_browser, run_browser
from tools.page.visit import count_colours, generate, read_figure, read_timings, wait_until_done

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the test extra has it)")
pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="there is no Chromium on the path (apt install chromium)"
)

PROMPT = "def fibonacci(n):"
PATIENCE_MS = 200_000
DESKTOP = {"width": 1280, "height": 720}
Open = Callable[..., Any]
API = re.compile(r"/(v1/.*|ready)$")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with run_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Any:
    """The tab that most tests share, because opening one takes longer than most tests."""
    return chromium.new_page()


@pytest.fixture
def visit(chromium: Any, tab: Any, pair: RunningServer) -> Iterator[Open]:
    """`visit(**options) -> Page`: opens the page and waits until it is ready; with browser options, in a new tab.

    `page.requests` has its requests, `page.console_errors` its warnings and errors. The test fails if any of these are
    left at the end, or if the page contacted another host.
    """
    pages: list[Any] = []
    console_errors: list[str] = []
    requests: list[Any] = []
    listeners: dict[str, Callable[[Any], object]] = {
        "console": lambda line: console_errors.append(line.text) if line.type in ("error", "warning") else None,
        "pageerror": lambda error: console_errors.append(str(error)),
        "request": lambda request: requests.append(request),
    }

    def opened(url: str = pair.url, expected: str = "ready", viewport: dict[str, int] = DESKTOP, **options: Any) -> Any:
        page = chromium.new_page(viewport=viewport, **options) if options else tab
        pages.append(page)
        page.set_default_timeout(PATIENCE_MS)
        page.set_viewport_size(viewport)
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(url)
        visiting.wait_until_ready(page, expected)
        page.console_errors, page.requests = console_errors, requests
        return page

    yield opened
    for page in pages:
        page.unroute_all(behavior="ignoreErrors")
        page.evaluate("location.host && sessionStorage.clear()")
        page.goto("about:blank")  # ends its requests
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        if page is not tab:
            page.close()
    assert not console_errors
    assert requests and all(request.url.startswith("http://127.0.0.1:") for request in requests)


def fill(page: Any, tokens: int = 32, mode: str = "ssd", seed: int = 2, prompt: str = PROMPT) -> None:
    visiting.fill_form(page, prompt, tokens, mode, 0.8, seed)


def endless(page: Any, tokens: int = 100_000) -> None:
    """Lets the scripted chat model write one text forever."""
    template(page, long=True)
    page.get_by_label("Max tokens").fill(str(tokens))


def template(page: Any, **keywords: bool) -> None:
    """Adds keywords of the chat template to the page's requests."""

    def another(route: Any) -> None:
        body = json.loads(route.request.post_data)
        route.continue_(post_data=json.dumps({**body, "chat_template_kwargs": keywords}))

    page.route("**/v1/chat/completions", another)


def sent_messages(page: Any) -> list[list[dict[str, str]]]:
    """Returns the conversation of each of the page's requests for a text."""
    return [request.post_data_json["messages"] for request in page.requests if request.method == "POST"]


def expected_text(pair: RunningServer, tokens: int = 32, seed: int = 2) -> str:
    return pair.client.generate(PROMPT, SamplingParams(max_tokens=tokens, temp=0.8, seed=seed), mode="ar").text


# --- texts, figures and timelines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd", "auto"])
def test_colours_and_figures_agree_with_the_timings(visit: Open, pair: RunningServer, mode: str) -> None:
    page = visit()
    fill(page, mode=mode)
    answer, lane = generate(page), page.locator(".lane")
    while mode == "sd" and count_colours(lane)["target"] == 32:  # no draft came in time
        with throttled(pid_of(pair.client, "target")):
            answer = generate(page)
    assert find_differences(lane, answer) == []
    seen, times = count_colours(lane), read_timings(answer)
    assert visiting.read_text(answer) == expected_text(pair) and seen.total() == 32 == int(read_figure(lane, "tokens"))
    drafts_in_time = mode in ("ssd", "auto")  # these draft only what they have time for
    assert times["cache_hits"] == 0 or drafts_in_time
    assert (seen["target"] == 32) == (mode == "ar") or drafts_in_time


def test_timeline_has_a_row_per_process_and_a_round_slider(visit: Open, pair: RunningServer) -> None:
    page = visit()
    fill(page)
    answer, timeline = generate(page), page.locator(".timeline")
    ahead = timeline.locator("svg[role=img] .bar.ahead")  # the legend has one, too
    while not ahead.count():  # the drafter had no time to work ahead
        with throttled(pid_of(pair.client, "target")):
            answer = generate(page)
    assert timeline.locator("svg[role=img] use").count()
    rows = timeline.locator("text.row").all_text_contents()
    assert rows == ["target", "draft-0", "orchestrator"]
    last = read_timings(answer)["rounds"] - 1
    slider = timeline.get_by_role("slider", name="Round")
    assert slider.get_attribute("aria-valuetext").startswith(f"Round {last} of {last}: ")
    slider.focus()
    page.keyboard.press("Home")
    assert slider.get_attribute("aria-valuetext").startswith(f"Round 0 of {last}: no chain; 1 token in ")
    page.keyboard.press("ArrowRight")
    shown = slider.get_attribute("aria-valuetext")
    assert shown.startswith(f"Round 1 of {last}: ") and timeline.locator(".chosen-round").inner_text() == shown


def test_work_without_a_draft_is_not_shown_as_one_on_request(visit: Open) -> None:
    page, span = visit(), {"start_ms": 1, "ms": 9}
    work = {"drafter": "draft-0", "round": 0, "depth": 0, "branches": 0, **span}
    record = {
        "round": 0,
        "lookup": "none",
        "source": "target",
        "drafted": 0,
        "accepted": 0,
        "tokens": 1,
        "decided": None,
    }
    event = {"choices": [{"delta": {}, "speculation": {"rounds": [{**record, "verify": span, "drafting": [work]}]}}]}
    body = f"data: {json.dumps(event)}\n\n{stream_of(['a'])}"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Generate").click()
    wait_until_done(page)
    drawing = page.locator(".timeline svg[role=img]")
    assert drawing.locator(".bar.drafted").count() == 0 and "nothing drafted yet" in drawing.text_content()


def test_race_ends_with_the_same_text_and_reports_the_speedup(visit: Open, pair: RunningServer) -> None:
    page = visit()
    fill(page, mode="auto", seed=5)
    page.get_by_label("Seed").fill("")  # drawn for AR and used for SSD, too

    def race() -> None:
        status, result = page.get_by_role("status"), "The same text, token for token: "
        while True:  # one seed in a hundred ends the text earlier
            page.requests.clear()
            page.get_by_role("button", name="Race").click()
            wait_until_done(page, result)
            if f"{result}32 tokens" in status.inner_text():
                return

    race()
    while not count_colours(page.locator(".lane").nth(1))["prepared"]:  # no prepared chain was in time
        with throttled(pid_of(pair.client, "target")):
            race()
    seed = int(re.search(r"seed (\d+)", page.get_by_role("status").inner_text())[1])  # type: ignore[index]
    ar, ssd = (page.locator(".lane").nth(place) for place in range(2))
    assert ar.locator(".text").text_content() == ssd.locator(".text").text_content() == expected_text(pair, seed=seed)
    assert count_colours(ar) == Counter(target=32) and count_colours(ssd)["prepared"]
    answers = [request.response() for request in page.requests if "chat" in request.url]
    rates = [read_timings(answer)["predicted_per_second"] for answer in answers]
    assert [read_figure(lane, "rate") for lane in (ar, ssd)] == [f"{rate:.1f}" for rate in rates]
    assert f" {rates[1] / rates[0]:.2f} times the speed of AR" in page.get_by_role("status").inner_text()
    assert answers[0].request.timing["startTime"] < answers[1].request.timing["startTime"]


def test_different_texts_are_not_reported_as_equal(visit: Open) -> None:
    """If AR's answer differed, the page would show where."""
    page = visit()

    def another(route: Any) -> None:
        body = json.loads(route.request.post_data)
        body["seed"] += body["speculation"]["mode"] == "ssd"
        route.continue_(post_data=json.dumps(body))

    page.route("**/v1/chat/completions", another)
    fill(page, tokens=16)
    page.get_by_role("button", name="Race").click()
    wait_until_done(page, "The texts differ from token ")


def test_stop_button_and_escape_cancel_the_request(visit: Open, pair: RunningServer) -> None:
    """The text of this seed has more than 400 tokens."""
    page = visit()
    fill(page, tokens=400)
    for way in ("button", "Escape"):
        while True:  # until it is stopped before its end
            before = pair.client.stats().totals.predicted_n
            with throttled(pid_of(pair.client, "target")):  # so that a busy browser can keep up
                page.get_by_role("button", name="Generate").click()
                page.locator(".text .token").nth(3).wait_for(state="attached")
            with suspended(pid_of(pair.client, "target")):
                if pair.client.stats().active == 0:
                    continue
                if way == "button":
                    page.get_by_role("button", name="Stop").click()
                else:
                    page.keyboard.press(way)
                wait_until_done(page, "Stopped.")
            break
        while (stats := pair.client.stats()).active:
            time.sleep(0.05)
        assert 3 < stats.totals.predicted_n - before < 400
    fill(page, tokens=4)
    page.get_by_role("button", name="Generate").click()
    wait_until_done(page)


def test_error_message_of_the_server_is_shown(visit: Open) -> None:
    page = visit()
    fill(page, prompt="word " * 4000)
    page.get_by_role("button", name="Generate").click()
    alert = page.get_by_role("alert")
    alert.filter(has_text="prompt is too long").wait_for()
    page.route(API, lambda route: route.abort())  # all requests: the page hides the error once the server answers
    fill(page)
    page.get_by_role("button", name="Generate").click()
    alert.filter(has_text="The server does not answer. Is `outrider serve` still running?").wait_for()
    page.unroute(API)
    page.get_by_role("button", name="Generate").click()
    wait_until_done(page)
    assert alert.count() == 0
    assert [words for words in page.console_errors if "Failed to load resource" not in words] == []
    page.console_errors.clear()  # the browser's own errors about status 400 and the lost server


def test_page_polls_a_lost_server_until_it_is_back(visit: Open) -> None:
    page = visit()
    state, alert = page.locator("#server"), page.locator("#problem")
    page.route(API, lambda route: route.abort())
    fill(page)
    page.get_by_role("button", name="Generate").click()
    state.filter(has_text="The server does not answer.").wait_for()
    assert alert.is_visible()
    page.unroute(API)
    visiting.wait_until_ready(page)
    assert not alert.is_visible()
    page.route(API, lambda route: route.fulfill(status=502, content_type="text/html", body="<h1>Bad gateway</h1>"))
    page.reload()
    state.filter(has_text="The server answered with status 502 and no reason.").wait_for()
    page.unroute(API)
    visiting.wait_until_ready(page)
    assert all("Failed to load resource" in words for words in page.console_errors)
    page.console_errors.clear()


def test_failed_stream_leaves_the_reason_and_no_progress(visit: Open) -> None:
    page = visit()
    error = json.dumps({"error": {"message": "the target was lost"}})
    body = f": prompt 1/9\n\ndata: {error}\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("alert").filter(has_text="the target was lost").wait_for()
    assert not page.locator(".lane .waiting").is_visible()


def test_text_that_is_incomplete_can_be_copied(visit: Open) -> None:
    page, whole = visit(), stream_of(["half a", " text"])
    body = whole.removesuffix("data: [DONE]\n\n")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("alert").filter(has_text="The answer is incomplete").wait_for()
    assert page.get_by_role("button", name="Copy").is_visible()


def test_failure_of_the_page_itself_cancels_the_request(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url)
    endless(page)
    page.evaluate("JSON.parse = (parse => text => String(text).includes('tock') ? parse('') : parse(text))(JSON.parse)")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("alert").wait_for()
    while chat.client.stats().active:
        time.sleep(0.05)
    page.console_errors.clear()  # the failure itself


def test_events_that_arrive_together_are_drawn_together(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url)
    one = {"delta": {"content": "a "}, "speculation": {"origins": [{"text": "a ", "origin": "target"}]}}
    events = [{"choices": [one]}] * 1000 + [{"choices": [], "outrider": {"seed": 1, "mode": "ar", "notes": []}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.evaluate("drawn = 0; scrollBy = () => drawn++")
    page.get_by_role("button", name="Send").click()
    wait_until_done(page)
    assert count_colours(page.locator(".lane")) == Counter(target=1000)
    assert 0 < page.evaluate("drawn") < 500


def test_page_whose_updates_are_slow_updates_less_often(visit: Open, chat: RunningServer) -> None:
    """A browser lays out a line of 12,000 tokens again for each update."""
    page = visit(chat.url)
    endless(page)
    page.evaluate("""() => {
        let now = 0;
        const wait = setTimeout;
        window.slow = new Promise((resolve) => {
            window.setTimeout = (then, ms) => (ms > 800 && resolve(ms), wait(then, 0));
        });
        performance.now = () => now;
        window.scrollBy = () => (now += 400);
    }""")
    page.get_by_role("button", name="Send").click()
    assert page.evaluate("slow") == 1200
    page.get_by_role("button", name="Stop").click()
    wait_until_done(page, "Stopped")


MARKDOWN = """# Lists

Some **bold *and* slanted** text with `a*b*c`, 2*3*4, ***both*** and snake_case_names.

1. one
2. two
   - inner, which
     goes on

```python
def f(**kw):
    return "`"
```
> quoted
"""


def stream_of(pieces: list[str]) -> str:
    """Returns a stream with one event for each piece, a token."""
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": piece}, "speculation": {"origins": [{"text": piece, "origin": "head"}]}}]}
        for piece in pieces
    ]
    events.append({"choices": [], "outrider": {"seed": 1, "mode": "ar", "notes": []}})
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def test_markdown_is_formatted_and_keeps_every_token(visit: Open, chat: RunningServer) -> None:
    page, pieces = visit(chat.url), re.findall(r"(?s).{1,3}", MARKDOWN)
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream_of(pieces))
    )
    page.get_by_role("button", name="Send").click()
    wait_until_done(page)
    text = page.locator(".lane .text")
    assert text.text_content() == MARKDOWN and count_colours(page.locator(".lane")) == Counter(head=len(pieces))
    kinds = ["heading", "paragraph", "item", "item", "item", "code", "quote"]
    assert text.locator("> *").evaluate_all("nodes => nodes.map(node => node.className)") == kinds
    colours = text.locator("u").evaluate_all("nodes => nodes.map(node => getComputedStyle(node).color)")
    assert len(set(colours)) == 1 < len(pieces) < len(colours)  # the parts of a divided token have the same colour
    assert text.locator("pre").inner_text().strip() == 'def f(**kw):\n    return "`"'
    assert "".join(text.locator(".strong:not(.emphasis)").all_inner_texts()) == "bold  slanted"
    assert "".join(text.locator(".strong.emphasis").all_inner_texts()) == "andboth"
    assert text.locator(".paragraph").inner_text().strip() == (
        "Some bold and slanted text with a*b*c, 2*3*4, both and snake_case_names."
    )


def test_growing_text_has_the_elements_of_the_whole_text(visit: Open) -> None:
    differing = """async () => {
        const { Painter } = await import("./page/painter.js");
        const parts = ["#", " ", "a", "\\n", "\\n\\n", "*", "**", "`", "```", "- ", "1. ", "b c", "> ", "|", "---", ""];
        const draw = (groups, formatted) => {
            const painter = new Painter(document.createElement("div"), formatted);
            for (const group of groups) painter.add(group);
            return painter.place;
        };
        for (let seed = 1, round = 0; round < 1000; round++) {
            const tokens = Array.from({ length: 20 }, () => {
                seed = (seed * 48271) % 2147483647;
                return { text: parts[seed % parts.length], origin: "target" };
            });
            const text = tokens.map((token) => token.text).join("");
            const formatted = round % 4 > 0;
            const [whole, grown] = [[tokens], tokens.map((token) => [token])].map((groups) => draw(groups, formatted));
            if (whole.innerHTML !== grown.innerHTML || grown.textContent !== text) return text;
            if (grown.querySelectorAll(".token").length !== tokens.length) return text;
        }
        return null;
    }"""
    assert visit().evaluate(differing) is None


def test_lines_of_a_plain_text_are_laid_out_one_by_one(visit: Open) -> None:
    """A long text in a single block would be laid out as a whole whenever it grows."""
    page, text = visit(), "def f():\n\n    return 1\n" * 50 + "end"
    body = stream_of(re.findall(r"(?s).{1,4}", text))
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Generate").click()
    wait_until_done(page)
    shown = page.locator(".lane .text")
    assert shown.text_content() == text and shown.locator("> *").count() == len(text.splitlines())
    heights = shown.locator("> *").evaluate_all("nodes => nodes.map(node => node.offsetHeight)")
    assert len(set(heights)) == 1  # an empty line, too
    assert shown.evaluate("node => (getSelection().selectAllChildren(node), String(getSelection()))") == text


def test_reasoning_is_folded_once_the_answer_begins(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url, permissions=["clipboard-read", "clipboard-write"])
    template(page, enable_thinking=True)
    page.get_by_label("Message").fill("2 + 2?")
    answer = generate(page)
    thoughts, text = page.locator(".thoughts"), page.locator(".lane .text")
    assert text.text_content() == visiting.read_text(answer) and "four" in text.inner_text()
    assert thoughts.get_attribute("open") is None and not page.locator(".thought").is_visible()
    thoughts.locator("summary").click()
    assert "let me see." in page.locator(".thought").inner_text()
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == text.text_content()


def test_page_follows_a_server_that_has_another_model(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url)
    models = {"data": [{"id": "another", "object": "model", "chat_template": False}]}
    generate(page)
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    page.route("**/v1/chat/completions", lambda route: route.abort(), times=1)
    page.get_by_label("Message").fill("Hello")
    page.get_by_label("Max tokens").fill("77")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Generate").wait_for()
    assert page.locator("#model").inner_text() == "another" and page.get_by_label("Prompt").input_value()
    assert page.get_by_label("Max tokens").input_value() == "77"  # the user's value
    with page.expect_request("**/v1/chat/completions") as sent:
        page.get_by_role("button", name="Generate").click()
    assert len(sent.value.post_data_json["messages"]) == 1  # it has no conversations
    wait_until_done(page)
    page.console_errors.clear()


def test_settings_unfold_if_one_of_them_is_invalid(visit: Open) -> None:
    page = visit()
    page.get_by_label("Max tokens").fill("")
    page.locator("summary").click()
    page.get_by_role("button", name="Generate").click()
    page.locator("#max-tokens:focus").wait_for()
    assert page.get_by_label("Max tokens").is_visible()


# --- a conversation ---------------------------------------------------------------------------------------------------


def test_text_is_above_its_figures_and_visible_on_a_phone(visit: Open) -> None:
    page = visit(viewport={"width": 390, "height": 700}, has_touch=True, is_mobile=True)
    assert page.get_by_label("Prompt").input_value() == "Once upon a time"  # so that the first click shows something
    assert not page.get_by_label("Max tokens").is_visible()
    generate(page)
    places = [
        page.locator(f".lane {part}").bounding_box()["y"]
        for part in (".text", ".key >> nth=0", ".figures", "svg[role=img]")
    ]
    assert places == sorted(places) and 0 <= places[0] < 700


def test_legend_is_complete_before_the_first_request(visit: Open) -> None:
    page = visit()
    origins = [page.locator(f"#legend .token.{origin}").inner_text() for origin in visiting.ORIGINS]
    timeline = page.locator("#legend .key li").all_inner_texts()
    generate(page)
    assert page.locator(".lane .said .key span.token").all_inner_texts() == origins
    assert page.locator(".lane .timeline .key li").all_inner_texts() == timeline and len(timeline) == 10


def test_page_of_a_chat_model_keeps_a_conversation(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url)
    message, turns, answers = page.get_by_label("Message"), page.locator(".turn"), page.locator(".lane .text")
    first = message.input_value()
    message.press("Shift+Enter")
    assert "\n" in message.input_value() and first  # an example
    message.fill("Who are you?")
    message.press("Enter")
    wait_until_done(page)
    answer = answers.inner_text()
    assert message.input_value() == "" and turns.all_inner_texts() == ["Who are you?"] and answer
    page.get_by_label("Message").fill("And I?")
    page.get_by_role("button", name="Send").click()
    turns.nth(1).wait_for()
    wait_until_done(page)
    assert sent_messages(page)[1] == [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And I?"},
    ]
    assert answers.count() == 2 and page.locator("main .timeline, main .figures").count() == 2  # the last answer's
    for width in (1280, 320):
        page.set_viewport_size({"width": width, "height": 600})
        assert overflowing(page) == []
    page.route(API, lambda route: route.abort())  # all requests: the page hides the error once the server answers
    message.fill("Lost?")
    message.press("Enter")
    page.get_by_role("alert").wait_for()
    assert message.input_value() == "Lost?" and turns.count() == 2  # it can be sent again
    page.get_by_role("button", name="New conversation").click()
    assert turns.count() == answers.count() == 0
    page.unroute(API)
    page.console_errors.clear()
    message.press("Enter")
    wait_until_done(page)
    assert [one["content"] for one in sent_messages(page)[-1]] == ["Lost?"]


def test_keys_of_an_input_method_neither_send_nor_stop(visit: Open, chat: RunningServer) -> None:
    """Chinese and Japanese are composed with Enter and Escape; Safari marks the last of them by its code only."""
    page = visit(chat.url)
    message = page.get_by_label("Message")
    message.fill("你好")
    for mark in ({"isComposing": True}, {"keyCode": 229}):
        message.dispatch_event("keydown", {"key": "Enter", **mark})
        assert page.locator(".turn").count() == 0
    with suspended(pid_of(chat.client, "target")):
        message.press("Enter")
        page.locator("#stop[aria-disabled=false]").wait_for()
        message.dispatch_event("keydown", {"key": "Escape", "isComposing": True})
    wait_until_done(page)
    assert page.locator(".turn").all_inner_texts() == ["你好"]


def test_answer_that_is_only_reasoning_so_far_is_kept(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url)
    template(page, enable_thinking=True)
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Message").fill("2 + 2?")
    page.get_by_role("button", name="Send").click()
    wait_until_done(page, "Cut off at max tokens.")
    assert page.locator(".turn").inner_text() == "2 + 2?" and "Hmm" in page.locator(".lane .thought").inner_text()
    page.get_by_label("Message").fill("And then?")
    page.get_by_role("button", name="Send").click()
    page.locator(".turn").nth(1).wait_for()
    wait_until_done(page)


def test_new_conversation_clears_the_race_and_the_error_before_it(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url)
    generate(page)
    page.get_by_label("Message").fill("Faster?")
    page.get_by_role("button", name="Race").click()
    wait_until_done(page, "The same text")
    anew, times, alert = page.locator("#anew"), page.locator("#times"), page.locator("#problem")
    assert times.is_visible()
    anew.click()
    assert not times.is_visible() and not anew.is_visible()
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json={"error": {"message": "full"}}))
    page.get_by_role("button", name="Send").click()
    alert.filter(has_text="full").wait_for()
    assert not anew.is_visible()  # the message is in the form again
    page.console_errors.clear()


def test_text_does_not_pull_back_a_reader_who_scrolls_by_keyboard(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url, viewport={"width": 1280, "height": 400})
    endless(page)
    count = "document.querySelectorAll('.lane .token').length"
    with throttled(pid_of(chat.client, "target")):
        page.get_by_role("button", name="Send").click()
        while page.evaluate("scrollY") < 100:
            time.sleep(0.05)
        page.mouse.click(800, 200)  # outside of the form, which keys would scroll if it had the focus
        page.keyboard.press("Home")
        while page.evaluate("scrollY"):
            time.sleep(0.05)
        before = page.evaluate(count)
        while page.evaluate(count) < before + 20:
            time.sleep(0.05)
        assert page.evaluate("scrollY") == 0
        page.get_by_role("button", name="Stop").click()
        wait_until_done(page, "Stopped.")


def test_page_still_follows_the_text_after_a_wheel_event_that_scrolls_nothing(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url, viewport={"width": 1280, "height": 900})
    endless(page)
    page.evaluate("addEventListener('wheel', () => (wheeled = true))")
    with throttled(pid_of(chat.client, "target")):
        page.get_by_role("button", name="Send").click()
        page.locator(".lane .text .token").first.wait_for()
        page.mouse.move(800, 200)
        page.mouse.wheel(40, 0)
        while not page.evaluate("window.wheeled"):
            time.sleep(0.05)
    while page.evaluate("scrollY") < 100:
        time.sleep(0.05)
    page.keyboard.press("Escape")
    wait_until_done(page, "Stopped.")


def test_long_lines_of_code_stay_at_their_beginning(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url, viewport={"width": 390, "height": 700})
    body = stream_of(["```\n", *[f"{'wide ' * 60}\n"] * 50, "wide " * 60])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.get_by_role("button", name="Send").click()
    wait_until_done(page)
    code = page.locator(".lane pre")
    assert code.evaluate("node => [node.scrollLeft, node.scrollWidth > node.clientWidth]") == [0, True]
    bottom = code.evaluate("node => node.getBoundingClientRect().bottom")
    assert 0 < bottom < page.locator(".composer").bounding_box()["y"]  # the text's end is visible


def test_right_to_left_text_is_written_from_the_right(visit: Open, chat: RunningServer) -> None:
    page = visit(chat.url)
    page.get_by_label("Message").fill("שלום")
    direction = "node => getComputedStyle(node).direction"
    assert page.get_by_label("Message").evaluate(direction) == "rtl"
    generate(page)
    assert page.locator(".turn").evaluate(direction) == "rtl"
    assert page.locator(".lane .text").evaluate(direction) == "ltr"
    page.locator(".lane .text").evaluate("node => (node.textContent = 'שלום')")
    assert page.locator(".lane .text").evaluate(direction) == "rtl"


# --- layout and accessibility ---------------------------------------------------------------------------------------


def overflowing(page: Any) -> list[str]:
    """Returns the elements that exceed the window or are cut off in their own box."""
    found: list[str] = page.evaluate(
        """() => [...document.body.querySelectorAll("*")]
            .filter((node) => !node.closest("svg") && node.checkVisibility())
            .filter((node) => {
                const box = node.getBoundingClientRect();
                return box.right > innerWidth + 1 || box.left < -1 || node.scrollWidth > node.clientWidth + 1
                    && getComputedStyle(node).display !== "inline" && !["INPUT", "SELECT"].includes(node.tagName);
            })
            .map((node) => node.outerHTML.slice(0, 100))"""
    )
    return found


def test_nothing_is_cut_off_or_scrolls_sideways(visit: Open) -> None:
    """A window of 1280 has 640 points at 200 % zoom, and 320 at 400 %."""
    page = visit()
    fill(page)
    page.get_by_role("button", name="Race").click()
    wait_until_done(page, "The same text")
    for width in (1440, 1280, 640, 360, 320):
        page.set_viewport_size({"width": width, "height": 450})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert overflowing(page) == []


def test_settings_can_be_reached_beside_a_long_text(visit: Open) -> None:
    page = visit(viewport={"width": 1280, "height": 450})
    fill(page)
    page.get_by_role("button", name="Generate").click()
    wait_until_done(page)
    page.evaluate("scrollTo(0, 100)")
    page.get_by_label("Branches").scroll_into_view_if_needed()
    box = page.get_by_label("Branches").bounding_box()
    assert box["y"] + box["height"] <= 450 and page.evaluate("scrollY") == 100


def test_page_is_usable_by_keyboard_with_visible_focus(visit: Open) -> None:
    page = visit()
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    fields = ["temperature", "top-p", "max-tokens", "seed", "mode", "num-draft-tokens", "branches"]
    assert seen == ["prompt", "generate", "race", "stop", "", *fields]  # the settings can be folded
    page.get_by_label("Max tokens").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("12")
    page.keyboard.press("Control+Enter")
    wait_until_done(page)
    assert (
        page.evaluate("document.activeElement.id") == "max-tokens"
        and read_figure(page.locator(".lane"), "tokens") == "12"
    )


def test_axe_finds_no_violations_in_light_and_dark_mode(visit: Open) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe here (the test extra has it)")
    page = visit(color_scheme="light")
    fill(page)
    page.get_by_role("button", name="Race").click()
    wait_until_done(page, "The same text")
    colours = {"runOnly": ["color-contrast"]}  # all that the scheme changes
    for scheme, options in {"light": {"resultTypes": ["violations"]}, "dark": colours}.items():
        page.emulate_media(color_scheme=scheme)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g)")
        assert all(int(part) < 64 for part in paper) == (scheme == "dark")
        found = axe.Axe().run(page, options=options).response["violations"]
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []


# --- keys ----------------------------------------------------------------------------------------------------------


def test_first_message_after_the_key_belongs_to_a_conversation(visit: Open, chat: RunningServer) -> None:
    """Enter in the key's field sends at once, before the page knows the model."""
    page = visit(chat.url)
    refusal = {"error": {"message": "no valid API key"}}
    page.route("**/v1/models", lambda route: route.fulfill(status=401, json=refusal))
    page.reload()
    visiting.wait_until_ready(page, "needs an API key")
    page.unroute("**/v1/models")
    page.locator("#prompt").fill("Hello")
    page.get_by_label("API key").fill("a-key")
    page.get_by_label("API key").press("Enter")
    wait_until_done(page)
    assert page.locator(".turn").inner_text() == "Hello" and page.locator(".lane h2").inner_text() == "Answer"
    page.console_errors.clear()  # the browser's own error about the refusal


def test_required_api_key_is_requested_and_kept_for_the_tab(visit: Open, guarded: str) -> None:
    page = visit(guarded, expected="needs an API key")
    fill(page, tokens=8)
    page.get_by_label("API key").fill("another")
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("alert").filter(has_text="no valid API key").wait_for()
    page.get_by_label("API key").fill("“a key”")
    page.get_by_role("button", name="Generate").click()
    page.get_by_role("alert").filter(has_text="The API key contains an invalid character").wait_for()
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Control+Enter")
    wait_until_done(page)
    page.get_by_label("Prompt").focus()
    visiting.wait_until_ready(page)
    page.reload()
    visiting.wait_until_ready(page)
    assert page.evaluate("[localStorage.length, document.cookie, location.href]") == [0, "", f"{guarded}/"]
    assert all("401" in words for words in page.console_errors)
    page.console_errors.clear()  # the browser's own error about each refusal
