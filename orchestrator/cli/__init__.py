"""The command line: `outrider COMMAND`. Each command is a file, imported when the command is run.

Only this package prints. Text and JSON go to stdout, everything else to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

from outrider import __version__
from outrider.orchestrator.cli import terminal
from outrider.orchestrator.cli.terminal import say, unwind_on_signals
from outrider.orchestrator.machine.system import require_mlx
from outrider.protocol.errors import InvalidRequest, OutriderError
from outrider.protocol.version import PROTOCOL_VERSION

HELP_COLUMN = 28

COMMANDS = {
    "generate": "complete a prompt",
    "chat": "chat with a model in the terminal",
    "serve": "start a server",
    "fleet": "run engines on several hosts behind one address",
    "worker": "run one worker in the foreground",
    "keys": "manage keys for connections between machines",
    "verify": "check that an output is exactly the target's",
    "bench": "compare with llama.cpp and mlx-lm on the same weights",
    "tune": "measure which settings are fastest on this machine",
    "overlap": "measure how much drafting and verifying overlap",
    "convert": "convert a model to a Core ML package",
    "doctor": "show this machine's hardware and how fast each device drafts",
    "pairs": "list model pairs, or check one",
    "pull": "download a model ahead of its first use",
    "completion": "print a completion script for bash, zsh or fish",
}
MLX_COMMANDS = {name: f"outrider.bench.commands.{name}" for name in ("bench", "tune", "overlap", "convert")}
"""Commands that import MLX, which this package may not do: they are only named here, and imported when run."""

COMMAND_GROUPS = {"fleet": "outrider.fleet.commands"}
"""Commands with subcommands: the module's `main` receives the remaining arguments."""

HELP_COMMAND = "help"
"""Before a command: shows the command's help; alone: lists the commands."""

INTERRUPTED_EXIT_CODE = 130


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wraps a text, unless it has indented lines, such as a list of commands."""
        return text.strip("\n") if "\n  " in text else super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Returns `-m, --max-tokens N` instead of `-m N, --max-tokens N`."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(sorted(action.option_strings, key=len))} {value}"


class _HelpAllAction(argparse._HelpAction):
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        if isinstance(parser, Parser):
            parser.common.clear()
        super().__call__(parser, *given)


class Parser(argparse.ArgumentParser):
    """Accepts values that begin with a dash, and no abbreviated flags; reports an error in one line on stderr, with
    InvalidRequest's exit code. --help shows the common flags, --help-all all of them."""

    def __init__(self, common: Collection[str] = (), **options: Any) -> None:
        """`common`: the flags that --help shows; empty for all."""
        super().__init__(**{"allow_abbrev": False, "add_help": False, "formatter_class": _Formatter, **options})
        self.common = set(common)
        self.add_argument("-h", "--help", action="help", help="show this help and exit")
        everything = "show the help with all flags and exit" if common else argparse.SUPPRESS
        self.add_argument("--help-all", action=_HelpAllAction, help=everything)

    def format_help(self) -> str:
        words = [self.prog]
        for action in self._get_positional_actions():
            name = str(action.metavar or action.dest.upper())
            words.append(name if action.required else f"[{name}]")
        self.usage = self.usage or " ".join((*words, "[FLAGS ...]"))
        if not self.common:
            return super().format_help()
        for action in self._actions:
            if action.option_strings and {"-h", "--help-all", *self.common}.isdisjoint(action.option_strings):
                action.help = argparse.SUPPRESS
        return f"{super().format_help()}\n{self.prog} --help-all shows all flags.\n"

    def parse(self, given: Sequence[str]) -> argparse.Namespace:
        """Parses like `parse_args`, but any word after a flag with a value is that value, unless it is a known flag.

        argparse mistakes every word that begins with a dash for a flag, so no text like "-x" could follow --prompt. And
        it takes a list of arguments to be complete, and perhaps empty, when the next flag comes.
        """
        options, unknown = self.parse_known_args(self._move_flags_first(given))
        if unknown:
            self.error(self._explain_unknown(unknown[0], "--" in given))
        return options

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}; see {self.prog} --help")
        sys.exit(InvalidRequest.exit_code)

    def _explain_unknown(self, word: str, is_argument: bool = False) -> str:
        if is_argument or not word.startswith("-"):
            takes_text = any(action.dest == "prompt" for action in self._actions)
            return f"unexpected argument {word!r}" + ("; a text of several words needs quotes" if takes_text else "")
        flag = word.partition("=")[0]
        close = get_close_matches(flag.replace("_", "-"), self._option_string_actions, n=1)
        return f"unknown flag {flag}" + (f" (did you mean {close[0]}?)" if close else "")

    def _move_flags_first(self, given: Sequence[str]) -> list[str]:
        """Returns the words with all flags, each joined with its value, before all arguments."""
        words, known = iter(given), self._option_string_actions
        flags, arguments = list[str](), list[str]()
        takes_words = False  # the latest flag has a list of values, or an optional one
        for word in words:
            action = known.get(word)
            if action is not None and action.nargs is None:
                value = next(words, None)
                if value is None or value in known:
                    self.error(str(argparse.ArgumentError(action, "expected one argument")))
                flags.append(f"{action.option_strings[0]}={value}")
                takes_words = False
            elif word == "--":
                arguments += [word, *words]
            elif word.startswith("-") and word != "-":
                if word.startswith("--") and word.partition("=")[0] not in known:
                    self.error(self._explain_unknown(word))  # here, before its value is mistaken for an argument
                flags.append(word)
                takes_words = action is not None and action.nargs != 0
            else:
                (flags if takes_words else arguments).append(word)
        return flags + arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `protocol.errors` lists the codes."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    return terminal.run_guarded(lambda: _run_command(given))


def run(name: str, load: Callable[[], ModuleType], arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code. `load` returns its module (`add_flags`, `run`); errors show `name`."""
    try:
        command = load()
        parser = Parser(prog=name, description=command.__doc__, common=common_flags(command))
        command.add_flags(parser)
        options = parser.parse(arguments)
        with unwind_on_signals():
            return int(command.run(options))
    except OutriderError as error:
        say(f"{name}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            say("")  # after the ^C that the terminal shows
        return INTERRUPTED_EXIT_CODE


def run_as_program() -> int:
    """Does the same as `run` for the module that Python was started with, as by `python -m tests.harness.identity`."""
    module = sys.modules["__main__"]
    name = f"python -m {module.__spec__.name.removesuffix('.__main__')}" if module.__spec__ else sys.argv[0]
    return terminal.run_guarded(lambda: run(name, lambda: module, sys.argv[1:]))


def _run_command(given: list[str]) -> int:
    if given[:1] == [HELP_COMMAND]:
        given = [*given[1:], "--help"]
    if given == ["--version"]:
        print(f"outrider {__version__} (protocol {PROTOCOL_VERSION})")
        return 0
    if given and given[0] in COMMAND_GROUPS:
        return int(import_command(given[0]).main(given[1:]))
    return run_group(create_parser(), COMMANDS, import_command, given)


def create_parser() -> Parser:
    """Returns the parser of `outrider` without a command."""
    parser = Parser(
        prog="outrider",
        description="Speculative speculative decoding with MLX and ONNX Runtime.",
        epilog=format_commands({**COMMANDS, HELP_COMMAND: "show the flags of a command: outrider help COMMAND"}),
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def run_group(
    parser: Parser, commands: Mapping[str, str], load: Callable[[str], ModuleType], given: Sequence[str]
) -> int:
    """Runs the one of `commands` that `given` begins with, from the module that `load` returns; returns its exit code.

    `parser` reads what names no command, and shows the help.
    """
    name = given[0] if given else ""
    if name in commands:
        return run(f"{parser.prog} {name}", partial(load, name), given[1:])
    parser.usage = f"{parser.prog} COMMAND ..."
    if name and name not in parser._option_string_actions:
        close = get_close_matches(name, commands, n=1)
        hint = f" (did you mean {close[0]}?)" if close else f"; expected one of {', '.join(commands)}"
        parser.error(f"expected a command before {name}" if name.startswith("-") else f"unknown command {name!r}{hint}")
    parser.parse(given)
    parser.print_help()
    return 0


def import_command(command: str) -> ModuleType:
    """Returns the command's module: it has `add_flags` and `run`; a group has `main`.

    Raises:
        InvalidRequest: the command imports MLX, whose library is not installed.
    """
    if command in MLX_COMMANDS:
        require_mlx()
    elsewhere = {**MLX_COMMANDS, **COMMAND_GROUPS}
    return import_module(elsewhere.get(command, f"outrider.orchestrator.cli.{command}"))


def common_flags(command: ModuleType) -> tuple[str, ...]:
    """Returns the flags that the command's --help shows; empty for all."""
    return tuple(getattr(command, "COMMON", ()))


def format_commands(commands: Mapping[str, str]) -> str:
    """Formats commands and what each does, for help."""
    width = max(map(len, commands))
    return "commands:\n" + "\n".join(f"  {name:{width}}  {what}" for name, what in commands.items())
