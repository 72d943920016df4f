"""N-grams in the target's process: copies from the text, or from a table, that cost neither a forward nor a message.

`NgramDrafter` is shared by all requests, and `NgramDraft` follows one request's text. Which copies to expect is decided
in `protocol.ngrams`, as in the orchestrator, which uses n-grams after a miss of its speculation cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.growth import Continuation, without_forwards
from outrider.drafters.work_ahead import DraftTurn
from outrider.protocol.messages import InProcess
from outrider.protocol.ngrams import INDEX_PIECE_TOKENS, Copy, CopyAcceptance, NgramIndex, NgramTable


class NgramDrafter:
    """Proposes copies from a request's text, or else from `table`, as long as they are worth their rows."""

    def __init__(self, table: NgramTable | None = None) -> None:
        self.table = table
        self.weight_bytes = table.nbytes if table is not None else 0
        self.acceptance = CopyAcceptance()

    def open_draft(self) -> NgramDraft:
        """Returns the n-grams of a new request."""
        return NgramDraft(self)


class NgramDraft:
    """The n-grams of one request; its text is indexed a piece at a time."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter, self._index = drafter, NgramIndex(table=drafter.table)
        self._length, self._last = 0, Copy()
        self._row_costs: Sequence[float] = ()

    def set_text(self, tokens: Sequence[int], row_costs: Sequence[float]) -> NgramDraft:
        """Sets the committed tokens, which extend those of the call before; the new ones show how far the last copy was
        right. `row_costs`: what the verify of 0, 1, ... tokens costs, in tokens."""
        new = tokens[self._length :]
        self._drafter.acceptance.add(self._last, new)
        self._length, self._row_costs = len(tokens), row_costs
        self._index.extend(new)
        self._index.index_more(INDEX_PIECE_TOKENS)
        return self

    def turn(self, tokens: Sequence[int], task: InProcess) -> DraftTurn:
        """Returns the turn in which `task` is drafted after the committed `tokens`; see `set_text`."""
        return DraftTurn(without_forwards(self.set_text(tokens, task.row_costs).continuation(task.depth)))

    def close(self, discard: bool) -> None:
        """Does nothing: later texts could use nothing."""

    def continuation(self, depth: int) -> Continuation:
        """Returns up to `depth` tokens that probably follow."""
        self._last = self._index.lookup(depth)
        length, _ = self._drafter.acceptance.best_length(self._last, self._row_costs)
        chain = self._last.chain[:length]
        return Continuation(chain)
