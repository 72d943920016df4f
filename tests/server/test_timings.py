"""The timings of an answer are JSON, except for those with a value per round."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from msgspec import structs, to_builtins

from outrider.protocol.messages import Timings
from outrider.protocol.sampling import SamplingParams
from outrider.server.answers.choices import UNFINISHED, ChoiceState, Splitter
from outrider.server.answers.formatter import build_statistics
from outrider.server.model.served import TokenizedPrompt


def test_timings_are_serialized_as_json() -> None:
    named = {one.name: {"draft-0": 3} for one in structs.fields(Timings) if one.default_factory is dict}
    full: dict[str, Any] = {**named, "prompt_n": 8, "prompt_ms": 4.0}
    choice = ChoiceState(0, TokenizedPrompt(()), SamplingParams(), Splitter())
    choice.result = replace(UNFINISHED, timings=Timings(**full))
    serialized = json.loads(json.dumps(build_statistics([choice])["timings"]))
    assert named and serialized.pop("prompt_per_second") == 2000.0
    known = json.loads(json.dumps(to_builtins(structs.asdict(Timings(**full)))))
    assert serialized == known
