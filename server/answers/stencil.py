"""An event whose text alone changes from chunk to chunk: written once by its shape, and filled in from then on."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pydantic_core import to_json

_PLACE = secrets.token_hex(16)


class Stencil:
    """`written` is the event with a text; the text stands in it once, as JSON."""

    def __init__(self, written: Callable[[str], bytes]) -> None:
        self._before, self._after = written(_PLACE).split(to_json(_PLACE))

    def filled(self, text: str) -> bytes:
        """The event with this text."""
        return self._before + to_json(text) + self._after
