"""What of a schema no grammar can hold, such as uniqueItems, is checked when the text is there, and told as a note."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from outrider.server.answers.telling import Choice
from outrider.server.mapping.form import Form

Notes = Callable[[Sequence[Choice]], list[str]]
_LONGEST = 300


def no_notes(_choices: Sequence[Choice]) -> list[str]:
    return []


def checker(form: Form | None) -> Notes:
    """For answers in this form."""
    if form is None or not form.loose:
        return no_notes
    import jsonschema_rs  # deferred: few schemas need it

    try:  # patterns without look-around take linear time, and nothing is fetched from elsewhere
        validator = jsonschema_rs.validator_for(
            json.loads(form.grammar.text), retriever=_nothing, pattern_options=jsonschema_rs.RegexOptions()
        )
    except ValueError as error:
        told = f"{form.param}: the schema can't be checked afterwards ({str(error)[:_LONGEST]})"
        return lambda _choices: [told]

    def notes(choices: Sequence[Choice]) -> list[str]:
        found = []
        for choice in choices:
            if choice.finish == "length" or choice.calls:
                continue
            wrong = _first(validator, choice.said)
            if wrong is not None:
                found.append(
                    f"{form.param}: choice {choice.index} does not satisfy its schema: {wrong[:_LONGEST]}; no grammar"
                    " holds this part of it, and strict would have refused it"
                )
        return found

    return notes


def _first(validator: Any, text: str) -> str | None:
    try:
        return next((str(error.message) for error in validator.iter_errors(json.loads(text))), None)
    except ValueError as error:
        return str(error)


def _nothing(_uri: str) -> Any:
    raise ValueError("no schema is fetched from elsewhere")
