"""A streamed event of plain text, which is put together around the text, equals the serialized one."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.sampling import SamplingParams
from outrider.server.answers.choices import AnswerPlan, ChoiceState, PartUpdate, Splitter, TextPart
from outrider.server.answers.formatter import event
from outrider.server.endpoints.completions import (
    Completion,
    CompletionChoice,
    CompletionRequest,
    TextCompletionFormatter,
)
from outrider.server.model.served import TokenizedPrompt

MODEL: Any = SimpleNamespace(id='a"b')
CHOICES = [ChoiceState(index, TokenizedPrompt(()), SamplingParams(), Splitter()) for index in range(2)]


@settings(max_examples=30)
@given(st.lists(st.text(), min_size=1, max_size=3))
def test_streamed_event_equals_the_serialized_event(texts: list[str]) -> None:
    formatter = TextCompletionFormatter(AnswerPlan(MODEL, 1, CHOICES), CompletionRequest(prompt="x"), [""])
    for text in texts:
        written = formatter.format_item(PartUpdate(CHOICES[1], TextPart(text)))
        found = json.loads(written.removeprefix(b"data: "))
        whole = Completion(**{**found, "choices": [CompletionChoice(index=1, text=text)]})
        assert written == event(whole.model_dump_json().encode()) and found["model"] == 'a"b'
