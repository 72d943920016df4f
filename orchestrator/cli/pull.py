"""Downloads a model ahead of its first use, and converts it if it is a GGUF file."""

from __future__ import annotations

import argparse

from outrider.orchestrator.pairing.model_files import DEFAULT_MODEL, find_model


def add_flags(parser: argparse.ArgumentParser) -> None:
    model = f"a name of `outrider pairs`, or a Hugging Face id (default: {DEFAULT_MODEL})"
    parser.add_argument("name", nargs="?", metavar="NAME|ID", default=DEFAULT_MODEL, help=model)


def run(options: argparse.Namespace) -> int:
    print(find_model(options.name).folder)
    return 0
