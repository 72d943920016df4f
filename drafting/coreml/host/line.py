"""A cache fed as one text, token after token: slot i holds position i. For whoever needs no tree."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.drafting.coreml.host.host import Fresh, Host, HostRows
from outrider.drafting.coreml.package.layout import Function


class Line:
    """Reads a text through `host`, which must stay on the thread that made this."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._cache = host.new_cache()
        self._seen = np.zeros(host.layout.slots, bool)
        self.length = 0

    def feed(self, tokens: Sequence[int], function: Function) -> Fresh:
        """Feeds the next tokens, at most as many as `function` has rows."""
        places = list(range(self.length, self.length + len(tokens)))
        past = np.broadcast_to(self._seen, (len(places), self._seen.size))
        own = np.tri(len(places), dtype=bool)
        fresh = self._host.forward(HostRows(list(tokens), places, places, past, own), self._cache, function)
        self._seen[places] = True
        self.length += len(places)
        return fresh

    def close(self) -> None:
        self._host.give_back(self._cache)
