"""Checks finished answers against what the grammar could not hold of a schema, such as uniqueItems, and the arguments
of calls that no grammar held. What does not fit becomes a note of the answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from outrider.server.answers.part_stream import ChoiceState
from outrider.server.mapping.form import Form
from outrider.server.mapping.speech import Toolbox
from outrider.server.model.tool_format import ToolCall

Notes = Callable[[Sequence[ChoiceState]], list[str]]
_LONGEST = 300


def no_notes(_choices: Sequence[ChoiceState]) -> list[str]:
    return []


def checker(form: Form | None, box: Toolbox | None = None) -> Notes:
    """For answers in this form, and for calls of tools that are not strict."""
    checks = ([_text_checker(form)] if form is not None and form.loose else []) + (
        [_call_checker(box)] if box is not None and box.tools else []
    )
    return (lambda choices: [note for check in checks for note in check(choices)]) if checks else no_notes


def _text_checker(form: Form) -> Notes:
    try:
        validator = _validator(json.loads(form.grammar.text))
    except ValueError as error:
        told = f"{form.param}: the schema can't be checked afterwards ({str(error)[:_LONGEST]})"
        return lambda _choices: [told]

    def notes(choices: Sequence[ChoiceState]) -> list[str]:
        found = []
        for choice in choices:
            if choice.finish == "length" or choice.calls:
                continue
            wrong = _first(validator, choice.text)
            if wrong is not None:
                found.append(
                    f"{form.param}: choice {choice.index} does not satisfy its schema: {wrong[:_LONGEST]}; no grammar"
                    " holds this part of it, and strict would have refused it"
                )
        return found

    return notes


def _call_checker(box: Toolbox) -> Notes:
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in box.tools}

    def wrong(call: ToolCall) -> str | None:
        if call.name in box.strict or call.name not in schemas:
            return None
        try:
            return _first(_validator(schemas[call.name]), call.arguments)
        except ValueError as error:
            return f"the schema can't be checked ({error})"

    def notes(choices: Sequence[ChoiceState]) -> list[str]:
        calls = [call for choice in choices for call in choice.calls]
        return [
            f"tools: the arguments of a call of {call.name} do not satisfy its schema: {why[:_LONGEST]}"
            for call in calls
            if (why := wrong(call)) is not None
        ]

    return notes


def _validator(schema: Any) -> Any:
    """Patterns without look-around take linear time, and nothing is fetched from elsewhere. Raises ValueError."""
    import jsonschema_rs  # deferred: few schemas need it

    return jsonschema_rs.validator_for(schema, retriever=_nothing, pattern_options=jsonschema_rs.RegexOptions())


def _first(validator: Any, text: str) -> str | None:
    try:
        return next((str(error.message) for error in validator.iter_errors(json.loads(text))), None)
    except ValueError as error:
        return str(error)


def _nothing(_uri: str) -> Any:
    raise ValueError("no schema is fetched from elsewhere")
