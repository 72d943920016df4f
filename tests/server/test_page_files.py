"""What the page is made of: open to everybody, held to asking nobody else, and nothing beside it is given out."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from tests.server.house import House


def test_the_page_is_open_its_policy_strict_and_nothing_else_is_given_out(guarded: str, pair: House) -> None:
    for path in ("/", "/page/main.js", "/page/style.css", "/page/icon.svg"):
        answer = httpx.get(f"{guarded}{path}")
        policy = answer.headers["content-security-policy"]
        assert answer.status_code == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        again = httpx.get(f"{guarded}{path}", headers={"if-none-match": answer.headers["etag"]})
        assert again.status_code == 304
    for path in ("/page/", "/page/none.js", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/page/..%2f..%2fREADME.md"):
        assert httpx.get(f"{guarded}{path}").status_code == 404
    assert httpx.get(f"{guarded}/page/..%2fmetrics").status_code == 404
    assert httpx.get(f"{guarded}/metrics").status_code == 401
    assert "/" not in httpx.get(f"{pair.url}/openapi.json").json()["paths"]


def test_every_file_of_the_page_is_used() -> None:
    folder = Path(__file__).parents[2] / "server" / "page"
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    everything = "".join(texts.values())
    assert not [name for name in texts if name != "index.html" and f"/{name}" not in everything]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", everything)
