"""Runs llama.cpp's server on the same GGUF file, by `xllamacpp`, which needs no HTTP. `peers` starts its process.

Each number of threads or slots and each kind of speculation needs a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp

TYPE_PREFIX = "COMMON_SPECULATIVE_TYPE_"
SLOT_CONTEXT_TOKENS = 2560
"""Tokens per slot: the longest prompt with its generated text."""


class LlamaCpp:
    """One server. `kind`: llama.cpp's name of a kind of speculation; `settings`: its parameters."""

    def __init__(
        self, model: str, draft_model: str | None, threads: int, slots: int, kind: str = "",
        settings: Mapping[str, int] = {},
    ) -> None:  # fmt: skip
        given = xllamacpp.CommonParams()
        given.model.path = model
        given.n_parallel, given.n_ctx = slots, SLOT_CONTEXT_TOKENS * slots
        given.cpuparams.n_threads = given.cpuparams_batch.n_threads = threads
        given.verbosity, given.warmup, given.cache_prompt, given.cache_ram_mib = 0, True, False, 0
        if kind:
            _enable_speculation(given, kind, settings, draft_model, threads)
        self._server = xllamacpp.Server(given)
        self._slots = slots

    def run(self, tokens: list[int], max_tokens: int, temp: float, seed: int, ignore_eos: bool) -> dict[str, Any]:
        request = _completion_request(tokens, max_tokens, temp, seed, ignore_eos)
        timings = self._server.handle_completions(request)["timings"]
        return {"tokens": [], "count": timings["predicted_n"], "decode_seconds": timings["predicted_ms"] / 1000}

    def batch(self, batch: list[list[int]], max_tokens: int, temp: float, seed: int) -> dict[str, Any]:
        """Completes all prompts, at most one per slot at a time."""
        begun = time.perf_counter()

        def ask(number: int, tokens: list[int]) -> dict[str, Any]:
            sent = time.perf_counter() - begun
            arrivals: list[tuple[float, int]] = []
            count = 0

            def on_chunk(chunk: Mapping[str, Any]) -> bool:
                nonlocal count
                if "timings" in chunk and (new := chunk["timings"]["predicted_n"] - count) > 0:
                    arrivals.append((time.perf_counter() - begun, new))
                    count += new
                return False  # go on

            request = _completion_request(tokens, max_tokens, temp, seed + number, True)
            self._server.handle_completions({**request, "stream": True, "timings_per_token": True}, on_chunk)
            return {"sent": sent, "arrivals": arrivals}

        with ThreadPoolExecutor(self._slots) as threads:
            return {"replies": list(threads.map(ask, range(len(batch)), batch))}


def _completion_request(tokens: list[int], max_tokens: int, temp: float, seed: int, ignore_eos: bool) -> dict[str, Any]:
    """Returns a request that samples by temperature only, as ours do, and uses no prompt cache."""
    return {
        "prompt": tokens,
        "max_tokens": max_tokens,
        "temperature": temp,
        "seed": seed,
        "ignore_eos": ignore_eos,
        "samplers": ["temperature"],
        "cache_prompt": False,
        "stream": False,
    }


def _enable_speculation(given: Any, kind: str, settings: Mapping[str, Any], draft: str | None, threads: int) -> None:
    """Enables `kind`, such as ngram-simple, with its parameters; draft-simple uses the draft model."""
    name = kind.upper().replace("-", "_")
    given.speculative.types = [getattr(xllamacpp.common_speculative_type, TYPE_PREFIX + name)]
    part = {"NGRAM_CACHE": "draft", "DRAFT_SIMPLE": "draft"}.get(name, name.lower())
    parameters = getattr(given.speculative, part)
    for field, value in settings.items():
        setattr(parameters, field, value)
    if draft is not None and part == "draft" and name != "NGRAM_CACHE":
        parameters.mparams.path = draft
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
