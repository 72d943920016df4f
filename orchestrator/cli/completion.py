"""Prints a script that completes commands, flags and their values. docs/install.md says where each shell reads it.

shtab generates the scripts from the commands' own parsers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from outrider.orchestrator.cli import COMMANDS, HELP_COMMAND, common_flags, create_parser, import_command

SHELLS = ("bash", "zsh", "fish")
FILE_METAVARS = {"FILE"}
FOLDER_METAVARS = {"DIR", "FOLDER", "PATH", "PACKAGE"}
"""Words in a metavar whose values are completed as files or as folders."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(options: argparse.Namespace) -> int:
    print(shtab.complete(build_parser(), options.shell))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Returns one parser of all commands, for shtab to read; commands are run with parsers of their own."""
    parser = create_parser()
    commands = parser.add_subparsers(dest="command")
    for name, summary in COMMANDS.items():
        module = import_command(name)
        module.add_flags(commands.add_parser(name, help=summary, description=summary, common=common_flags(module)))
    commands.add_parser(HELP_COMMAND, help="show the flags of a command").add_argument("name", choices=[*COMMANDS])
    _annotate_all(parser)
    return parser


def _annotate_all(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _annotate_all(inner)
        else:
            _annotate(action)


def _annotate(action: argparse.Action) -> None:
    """Sets how shtab completes an argument's value, by its metavar: from a list of words, or as a file or folder."""
    words = set(str(action.metavar or "").split("|"))
    if words & FOLDER_METAVARS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif words & FILE_METAVARS or action.type is Path:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    if action.choices is None:
        action.choices = sorted(word for word in words if len(words) > 1 and word.islower()) or None
