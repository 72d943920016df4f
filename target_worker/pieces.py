"""How much of waiting prompts is read in a forward that others decode in: what forwards cost by their rows decides."""

from __future__ import annotations

from outrider.engine.forward_cost import FADE, ForwardCost
from outrider.engine.slots import PREFILL

# With a piece of a prompt a forward takes by this share longer than those that decode are used to, for each prompt that
# waits: a forward over more rows than usual is lengthened less, one over fewer more.
READING_SHARE = 0.5
# Where chains are verified whoever is late for a forward waits for two of them.
READING_SHARE_BESIDE_CHAINS = 0.25
SMALLEST_PIECE = 8
# A piece is so many times the last one at most: what a token takes is known from few forwards, some of them disturbed.
GROWTH = 2


class Pieces:
    """Learns of forwards as they come. `last`: how much the latest one read."""

    def __init__(self) -> None:
        self.cost = ForwardCost()
        self.last = 0
        self._members = self._rows = 0.0

    def saw(self, members: int, own: int, rows: int, milliseconds: float) -> None:
        """A forward over so many `rows`, `own` of them those of `members` that decode."""
        self.cost.add(rows, milliseconds)
        self._members = FADE * self._members + members
        self._rows = FADE * self._rows + members * own

    def room(self, readers: int, decoding: int, rows: int) -> int:
        """How many tokens may be read for so many `readers` beside `rows` of those that decode."""
        if not self.cost.seen:
            return SMALLEST_PIECE
        fixed, each = self.cost.line
        share = readers * (READING_SHARE_BESIDE_CHAINS if rows > decoding else READING_SHARE)
        usual = max(self._rows / self._members if self._members else 0.0, decoding)  # as one who decodes sees it
        fits = usual - max(rows, decoding) + share * (fixed + each * usual) / each
        return int(min(max(min(fits, GROWTH * self.last), SMALLEST_PIECE), PREFILL))
