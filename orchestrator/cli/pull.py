"""Downloads a model into the cache and converts it before its first use; `outrider pairs` lists the names."""

from __future__ import annotations

import argparse

from outrider.orchestrator.cli.terminal import say
from outrider.orchestrator.pairing.model_files import DEFAULT_MODEL, find_model
from outrider.orchestrator.pairing.pulled import PULLED_MODELS, pull
from outrider.protocol.errors import InvalidRequest


def add_flags(parser: argparse.ArgumentParser) -> None:
    names = f"{' or '.join(PULLED_MODELS)} (default: {DEFAULT_MODEL})"
    parser.add_argument("name", nargs="?", metavar="NAME", default=DEFAULT_MODEL, help=names)
    parser.add_argument("--accept-terms", action="store_true", help="accept the model's terms of use, if it has any")


def run(options: argparse.Namespace) -> int:
    if (model := PULLED_MODELS.get(options.name)) is None:
        raise InvalidRequest(f"there is no model {options.name!r} to pull; expected one of {', '.join(PULLED_MODELS)}")
    if not model.is_on_disk:
        say(f"{model.title}: {model.size / 1e6:.0f} MB, {model.licence}{f', {model.terms}' if model.terms else ''}")
    path = pull(model, options.accept_terms)
    print(f"{model.name}: {path}")
    print(f"converted: {find_model(model.name).folder}")
    return 0
