"""The page's files are public, contact no other host, and no other file is served."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from outrider.protocol.schema import Origin
from tests.server.running_server import RunningServer
from tools.page.visit import ORIGINS


def test_page_files_are_public_with_a_strict_policy_and_no_others_served(guarded: str, pair: RunningServer) -> None:
    for path in ("/", "/page/main.js", "/page/style.css", "/page/icon.svg"):
        answer = httpx.get(f"{guarded}{path}")
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        again = httpx.get(f"{guarded}{path}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    for path in ("/page/", "/page/none.js", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/..%2f..%2fREADME.md"):
        assert httpx.get(f"{guarded}{path}").status_code == 404
    assert httpx.get(f"{guarded}/page/..%2fmetrics").status_code == 404
    assert httpx.get(f"{guarded}/v1/models").status_code == 401
    assert '="/' not in httpx.get(f"{pair.url}/docs").text + httpx.get(pair.url).text  # a proxy may add a prefix
    assert "/" not in httpx.get(f"{pair.url}/openapi.json").json()["paths"]


def test_every_file_of_the_page_is_used() -> None:
    folder = Path(__file__).parents[2] / "server" / "page"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    everything = "".join(texts.values())
    assert not [name for name in texts if name != "index.html" and f"/{name}" not in everything]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", everything)


def test_every_token_origin_has_a_label_a_colour_and_a_counter() -> None:
    """The page would fail in the middle of a text without one."""
    folder = Path(__file__).parents[2] / "server" / "page"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    for origin in (origin.name.lower() for origin in Origin):
        assert f"\n  {origin}: " in texts["painter.js"]
        assert f'data-count="{origin}"' in texts["index.html"]
        assert f"--{origin}: light-dark(#" in texts["style.css"]
        assert origin in ORIGINS


def test_number_fields_of_the_page_have_the_limits_of_the_api(pair: RunningServer) -> None:
    """A larger number than the API takes would be refused only after it was sent."""
    page = httpx.get(pair.url).text
    schemas = httpx.get(f"{pair.url}/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatRequest"]["properties"] | schemas["Speculation"]["properties"]
    found = re.findall(r'name="(\w+)" type="number" min="(\d+)" max="(\d+)"', page)
    assert {"temperature", "top_p", "max_tokens", "num_draft_tokens", "branches"} <= {name for name, _, _ in found}
    for name, low, high in found:
        (number,) = (kind for kind in fields[name].get("anyOf", [fields[name]]) if kind.get("type") != "null")
        assert number["minimum"] <= int(low) and int(high) <= number["maximum"], name
