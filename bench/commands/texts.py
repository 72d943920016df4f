"""The prompts of a bench as tokens, by class: those of the suite through its chat template, others as they are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

from outrider.bench.prompts import SUITE, load, load_suite
from outrider.orchestrator.pair.model_text import load_text
from outrider.orchestrator.pair.pairing import ChosenPair
from outrider.orchestrator.pair.tokenizer import load_codec

Tokens = tuple[int, ...]


def add_flags(group: argparse._ArgumentGroup) -> None:
    kinds = "classes of prompts (default: all of the suite, else code; with --concurrency all)"
    group.add_argument("--classes", metavar="C,C,...", help=kinds)
    folder = (
        "ask what people ask a chat model, all classes in turns, and compare with llama.cpp on the same GGUF file;"
        " DIR: a folder of your own prompts, CLASS.txt for each class, prompts with a line %% between"
        " (default: Outrider's own)"
    )
    group.add_argument("--suite", nargs="?", type=Path, const=SUITE, metavar="DIR", help=folder)


def of_classes(options: argparse.Namespace, pair: ChosenPair, usual: Sequence[str]) -> dict[str, list[Tokens]]:
    """`usual`: the classes where none are named and no suite is asked for.

    Raises:
        InvalidRequest: there are no such prompts.
    """
    kinds = None if options.classes is None else options.classes.split(",")
    if options.suite is not None:
        text = load_text(pair.target)
        found = load_suite(options.suite, kinds)
        return {kind: [text.tokens(prompt.text) for prompt in prompts] for kind, prompts in found.items()}
    codec = load_codec(pair.target)
    return {kind: [codec.encode(prompt.text) for prompt in load(kind)] for kind in kinds or usual}


def in_turn(classes: Sequence[Sequence[Tokens]]) -> list[Tokens]:
    """One of each class after the other, as long as there are any."""
    return [tokens for tokens in chain.from_iterable(zip_longest(*classes)) if tokens is not None]
