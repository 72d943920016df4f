"""N-grams in the target's process: copies from the text, or from a table, that cost neither a forward nor a message.

`protocol.ngrams` decides which copies to expect, also for the orchestrator after a miss of its speculation cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafters.growth import Continuation, without_forwards
from outrider.drafters.work_ahead import DraftTurn
from outrider.protocol.messages import InProcess
from outrider.protocol.ngrams import INDEX_PIECE_TOKENS, Copy, CopyAcceptance, NgramIndex, NgramTable


class NgramDrafter:
    """Shared by all requests: proposes copies from a text, or else from `table`, as long as they are worth their
    rows."""

    def __init__(self, table: NgramTable | None = None) -> None:
        self.table = table
        self.weight_bytes = table.nbytes if table is not None else 0
        self.acceptance = CopyAcceptance()


class NgramDraft:
    """The n-grams of one request; its text is indexed a piece at a time."""

    def __init__(self, drafter: NgramDrafter) -> None:
        self._drafter, self._index = drafter, NgramIndex(table=drafter.table)
        self._length, self._last = 0, Copy()

    def turn(self, tokens: Sequence[int], task: InProcess) -> DraftTurn:
        """Returns the turn with up to `task.depth` tokens that probably follow the committed `tokens`, which extend
        those of the call before; the new ones show how far the last copy was right."""
        new, acceptance = tokens[self._length :], self._drafter.acceptance
        acceptance.add(self._last, new)
        self._length = len(tokens)
        self._index.extend(new)
        self._index.index_more(INDEX_PIECE_TOKENS)
        self._last = self._index.lookup(task.depth)
        length, _ = acceptance.best_length(self._last, task.row_costs)
        return DraftTurn(without_forwards(Continuation(self._last.chain[:length])))

    def close(self, discard: bool) -> None:
        """Does nothing: later texts could use nothing."""
