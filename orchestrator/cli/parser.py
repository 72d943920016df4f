"""argparse with one sentence for a wrong flag instead of a page, values that may begin with a dash, and help in two
lengths: --help shows the flags that most people need, --help-all shows all.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from outrider.orchestrator.cli.terminal import say
from outrider.protocol.errors import InvalidRequest

HELP_COLUMN = 28
_FLAGS = argparse.Action([], "flags", nargs="?", metavar="FLAGS ...")
"""What stands in a usage for all flags that may be left out."""


class _Formatter(argparse.HelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=HELP_COLUMN, **options)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """`-m, --max-tokens N` instead of the value once for each name."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(sorted(action.option_strings, key=len))} {value}"


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(parser.format_help(everything=True) if isinstance(parser, Parser) else parser.format_help(), end="")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Flags in full only; an error is one line on stderr and InvalidRequest's exit code."""

    def __init__(self, common: Collection[str] = (), **options: Any) -> None:
        """`common`: the flags that --help shows; empty: all."""
        super().__init__(**{"allow_abbrev": False, "add_help": False, "formatter_class": _Formatter, **options})
        self._common = set(common)
        self.add_argument("-h", "--help", action="help", help="show this help and exit")
        if common:
            self.add_argument("--help-all", action=_HelpAll, help="show the help with all flags and exit")

    def format_help(self, everything: bool = False) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, [*self._required(), _FLAGS], self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            shown = [action for action in group._group_actions if everything or self._is_common(action)]
            if shown:
                formatter.start_section(group.title)
                formatter.add_arguments(shown)
                formatter.end_section()
        formatter.add_text(self.epilog)
        if self._common and not everything:
            formatter.add_text(f"{self.prog} --help-all shows all flags.")
        return formatter.format_help()

    def _is_common(self, action: argparse.Action) -> bool:
        names = action.option_strings
        return not self._common or not names or not {"-h", "--help-all", *self._common}.isdisjoint(names)

    def _required(self) -> list[argparse.Action]:
        """What a usage has to show."""
        groups = [group._group_actions for group in self._mutually_exclusive_groups if group.required]
        needed = [action for group in groups for action in group]
        return [action for action in self._actions if not action.option_strings or action.required or action in needed]

    def parse(self, given: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, but what follows a flag that takes a value is its value unless it is a flag itself.

        argparse takes any word that begins with a dash for a flag, so no text like "-x" could follow --prompt.
        """
        options, unknown = self.parse_known_args(list(self._joined(given)))
        if unknown:
            self.error(self._unknown(unknown[0]))
        return options

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}; see {self.prog} --help")
        sys.exit(InvalidRequest.exit_code)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}; a text of several words needs quotes"
        flag = word.partition("=")[0]
        close = get_close_matches(flag.replace("_", "-"), self._option_string_actions, n=1)
        return f"unknown flag {flag}" + (f" (did you mean {close[0]}?)" if close else "")

    def _joined(self, given: Sequence[str]) -> Iterator[str]:
        words = iter(given)
        flags = self._option_string_actions
        for word in words:
            if word in flags and flags[word].nargs is None:
                value = next(words, None)
                dashed = value is not None and value.startswith("-") and value not in flags
                yield f"{flags[word].option_strings[0]}={value}" if dashed else word
                if not dashed and value is not None:
                    yield value
            elif word.startswith("--") and word != "--" and word.partition("=")[0] not in flags:
                self.error(self._unknown(word))  # before its value is taken for an argument
            else:
                yield word
                if word == "--":
                    yield from words
