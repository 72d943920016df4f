"""Completes a prompt: starts a cluster of its own, or asks a running one, and streams the text to stdout."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outrider.orchestrator.cli import flags, streams
from outrider.orchestrator.cli.screen import Screen, say
from outrider.orchestrator.client.client import Client
from outrider.orchestrator.client.cluster import LocalCluster
from outrider.orchestrator.client.dialogue import Wish
from outrider.orchestrator.client.result import GenerationResult
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.messages import Timings

REQUEST_SETTINGS = ("mode", "num_draft_tokens", "branches", "log_level")
TIMINGS = (
    "prompt_n", "cache_n", "draft_cache_n", "prompt_ms", "predicted_n", "predicted_ms", "predicted_per_second",
    "draft_n", "draft_n_accepted", "draft_rounds", "cache_hits", "cache_misses",
)  # fmt: skip


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_generation_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(options: argparse.Namespace) -> int:
    flags.set_up_logging(options)
    screen = Screen()
    wish = wish_of(options)
    result = generate(options, wish, screen, show_text=not options.json)
    if options.json:
        print(json.dumps(as_json(result, wish), ensure_ascii=not streams.takes_unicode()))
    else:
        say(result.summary())
    return 0


def add_generation_flags(parser: argparse.ArgumentParser, prompt_needed: bool = True) -> None:
    """Everything that says what to generate and where; `verify` has the same."""
    parser.add_argument("--prompt", "-p", required=prompt_needed, help="the text to complete; - reads it from stdin")
    parser.add_argument("--ignore-chat-template", action="store_true", help="take the prompt as plain text")
    parser.add_argument("--connect", metavar="ENDPOINT", help="ask the server there instead of starting a cluster")
    flags.add_sampling_flags(parser)
    flags.add_request_flags(parser)
    flags.add_cluster_flags(parser)


def generate(options: argparse.Namespace, wish: Wish, screen: Screen, show_text: bool) -> GenerationResult:
    """One completion, made where the flags say; everything that can be checked is checked before anything starts."""
    with server(options, screen) as client:
        stream = client.stream(
            wish.prompt,
            wish.sampling,
            mode=wish.mode,
            num_draft_tokens=wish.num_draft_tokens,
            branches=wish.branches,
            chat_template=wish.chat_template,
            progress=lambda done, total: screen.show(f"reading the prompt: {done} of {total} tokens"),
        )
        for chunk in stream:
            screen.clear()
            if show_text:
                print(chunk.text, end="", flush=True)
        screen.clear()
        if show_text:
            print()
        return stream.result


def wish_of(options: argparse.Namespace) -> Wish:
    """What the flags ask for, checked."""
    return Wish(
        prompt=read_prompt(options.prompt),
        sampling=flags.sampling_of(options),
        mode=options.mode or "auto",
        num_draft_tokens=options.num_draft_tokens,
        branches=options.branches,
        chat_template=not options.ignore_chat_template,
    )


@contextmanager
def server(options: argparse.Namespace, screen: Screen) -> Iterator[Client]:
    """A client of the server at --connect, or of a cluster that lives as long as the context."""
    settings = flags.settings_of(options)
    if options.connect is not None:
        _refuse_cluster_settings(settings)
        yield Client(options.connect)
        return
    with LocalCluster(progress=screen.show, **settings) as cluster:
        screen.clear()
        yield cluster.client()


def read_prompt(given: str) -> str:
    if given != "-":
        return given
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt on stdin is not UTF-8 ({error.reason}); expected text") from None


def as_json(result: GenerationResult, wish: Wish) -> dict[str, Any]:
    """The result under llama.cpp's names, with all that `verify` must know to prove it."""
    sampling = dataclasses.asdict(wish.sampling)
    del sampling["seed"]  # what was drawn stands beside it
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "mode": result.mode,
        "seed": result.seed,
        "model": result.model,
        "draft_model": result.draft_model,
        "prompt": wish.prompt,
        "chat_template": wish.chat_template,
        "sampling": sampling,
        "timings": _timings(result.timings),
        **({} if result.logprobs is None else {"logprobs": [dataclasses.asdict(one) for one in result.logprobs]}),
    }


def _timings(timings: Timings) -> dict[str, float]:
    return {name: getattr(timings, name) for name in TIMINGS}


def _refuse_cluster_settings(settings: dict[str, Any]) -> None:
    foreign = [f"--{name.replace('_', '-')}" for name in settings if name not in REQUEST_SETTINGS]
    if foreign:
        raise InvalidRequest(f"{', '.join(foreign)} is the running server's own choice; leave it out with --connect")
