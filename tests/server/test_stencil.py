"""An event that is filled from a stencil equals the serialized one."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.answers import formatter
from outrider.server.answers.formatter import Stencil
from outrider.server.endpoints.completions import Completion, CompletionChoice


def event(text: str) -> bytes:
    choice = CompletionChoice(index=1, text=text)
    shape = Completion(id="cmpl-1", created=1, model='a"b', system_fingerprint="f", choices=[choice])
    return formatter.event(shape.model_dump_json())


@given(st.text())
def test_filled_stencil_equals_the_serialized_event(text: str) -> None:
    filled = Stencil(event).filled(text)
    assert filled == event(text)
    assert json.loads(filled.removeprefix(b"data: "))["choices"][0]["text"] == text
