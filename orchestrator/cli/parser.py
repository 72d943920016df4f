"""argparse with one sentence for a wrong flag instead of a page, and with values that may begin with a dash."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from outrider.orchestrator.cli.screen import say
from outrider.protocol.errors import InvalidRequest


class Parser(argparse.ArgumentParser):
    """Flags in full only; an error is one line on stderr and InvalidRequest's exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, given: Sequence[str]) -> argparse.Namespace:
        """Like `parse_args`, but what follows a flag that takes a value is its value unless it is a flag itself.

        argparse takes any word that begins with a dash for a flag, so no text like "-x" could follow --prompt.
        """
        return self.parse_args(list(self._joined(given)))

    def error(self, message: str) -> NoReturn:
        say(f"{self.prog}: {message}; see {self.prog} --help")
        sys.exit(InvalidRequest.exit_code)

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
            else:
                yield word
