"""argparse with one sentence for a wrong flag instead of a page."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn

from outrider.protocol.errors import InvalidRequest


class Parser(argparse.ArgumentParser):
    """Flags in full only; an error is one line on stderr and InvalidRequest's exit code."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(InvalidRequest.exit_code)
