"""Fields that no shape here has: ignored and counted, or refused where the answer would not be what was asked for.

APIs grow, and clients send what is new before any server here knows it. A field is refused all the same when it is one
of another path here, or of another server, that changes what is said, or a known one misspelt.
"""

from __future__ import annotations

import logging
from collections import Counter
from difflib import get_close_matches
from functools import cache
from typing import Any

from outrider.server.problems import Refused
from outrider.server.shapes.base import ApiRequest
from outrider.server.shapes.chat import ChatRequest, CompletionRequest
from outrider.server.shapes.messages import MessagesRequest
from outrider.server.shapes.plain import TokenizeRequest
from outrider.server.shapes.responses import ResponsesRequest

_ALIKE = 0.9
_NAMES_KEPT = 200
_LONGEST = 80
_SHAPES = (ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest)
_HARMLESS = frozenset({"include", "stream_options", "timeout", "truncation"})
"""Fields of some paths here that change no text elsewhere."""
_OTHERS = frozenset(
    {
        "add_special_tokens", "allowed_token_ids", "bad_words", "chat_template", "documents", "dry_allowed_length",
        "dry_base", "dry_multiplier", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
        "dynatemp_range", "ebnf", "format", "images", "include_stop_str_in_output", "input_extra", "json",
        "length_penalty", "logits_processors", "lora", "lora_path", "mirostat", "mirostat_eta", "mirostat_tau",
        "n_keep", "n_predict", "n_probs", "num_beams", "options", "prompt_embeds", "prompt_logprobs", "regex",
        "repeat_last_n", "repeat_penalty", "samplers", "skip_special_tokens", "stop_regex", "stop_token_ids",
        "tfs_z", "thinking_budget", "thinking_budget_tokens", "top_a", "top_n_sigma", "truncate_prompt_tokens",
        "typical_p", "use_beam_search", "xtc_probability", "xtc_threshold",
    }
)  # fmt: skip
"""What vLLM, llama.cpp, SGLang and others know beside the API, and what changes the text there."""

log = logging.getLogger(__name__)


def ignorable(asked: ApiRequest) -> list[str]:
    """The names of the fields that may be ignored.

    Raises:
        Refused: one may not.
    """
    given: dict[str, Any] = asked.model_extra or {}
    names = [name for name, value in given.items() if value is not None]
    for name in names:
        if name in _OTHERS or name in _elsewhere():
            raise Refused(f"{name}: this path has no such field, and without it the answer would differ", name)
        near = get_close_matches(name, _meant(type(asked)), 1, _ALIKE)
        if near:
            raise Refused(f"{name[:_LONGEST]}: no such field is known here; did you mean {near[0]}?", name[:_LONGEST])
    return names


class IgnoredFields:
    """How often each unknown field was ignored. The log tells of its 1st time, its 10th, its 100th and so on."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def note(self, path: str, names: list[str]) -> None:
        """Takes the fields of one request."""
        for name in names:
            kept = name if name in self._counts or len(self._counts) < _NAMES_KEPT else "others"
            self._counts[kept] += 1
            count = self._counts[kept]
            if str(count).strip("0") == "1":
                log.warning("ignored the unknown field %r of a request to %s (%d so far)", kept[:_LONGEST], path, count)


@cache
def _meant(shape: type[ApiRequest]) -> tuple[str, ...]:
    """The fields of `shape` that the answer depends on: those that are ignored have any value."""
    return tuple(name for name, field in shape.model_fields.items() if field.annotation is not Any)


@cache
def _elsewhere() -> frozenset[str]:
    return frozenset(name for shape in _SHAPES for name in _meant(shape)) - _HARMLESS
