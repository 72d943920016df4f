"""Prints a script that completes commands, flags and their values; where each shell wants it is in docs/install.md.

The scripts are shtab's, made of the very parsers that the commands read their flags with.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from outrider.orchestrator.cli import COMMANDS, HELP, Parser, common_flags, module_of
from outrider.orchestrator.machine.system import require_mlx

SHELLS = ("bash", "zsh", "fish")
FILES = {"FILE"}
FOLDERS = {"DIR", "FOLDER", "PATH", "PACKAGE"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that the script is for")


def run(options: argparse.Namespace) -> int:
    require_mlx()  # commands that measure import it
    print(shtab.complete(whole_parser(), options.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """All commands in one; it is only looked at, for each command has a parser of its own."""
    parser = Parser(prog="outrider", description="Speculative speculative decoding on MLX.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command")
    for name, what in COMMANDS.items():
        module = module_of(name)
        module.add_flags(commands.add_parser(name, help=what, description=what, common=common_flags(module)))
    commands.add_parser(HELP, help="the flags of a command").add_argument("name", choices=[*COMMANDS])
    _tell_of(parser)
    return parser


def _tell_of(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                _tell_of(inner)
        else:
            _tell(action)


def _tell(action: argparse.Action) -> None:
    """What may stand in an argument is said in its metavar: words to choose from, files, folders."""
    words = set(str(action.metavar or "").split("|"))
    if words & FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif words & FILES or action.type is Path:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    if action.choices is None:
        action.choices = sorted(word for word in words if len(words) > 1 and word.islower()) or None
