"""Which way of drafting belongs to a head."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.drafting.heads.blocks import Blocks
from outrider.drafting.heads.contexts import Contexts
from outrider.drafting.heads.head import BlockHead, Head, MaskedHead, StepHead
from outrider.drafting.heads.numpy_head import NumpyHead
from outrider.drafting.heads.pairs import MaskedPairs
from outrider.drafting.heads.steps import Steps
from outrider.drafting.heads.way import TriedWay
from outrider.protocol.errors import CannotDraft


def way_of(head: Head, numpy: NumpyHead | None = None) -> TriedWay:
    """`numpy` makes its forwards of few pairs. Raises CannotDraft: it is of no known kind."""
    if isinstance(head, BlockHead):
        return Blocks(head, Contexts(head), head.link)
    if isinstance(head, MaskedHead):
        return Blocks(head, MaskedPairs(head, numpy), numpy=numpy)
    if isinstance(head, StepHead):
        return Steps(head, numpy)
    raise CannotDraft(f"nothing here drafts with a {type(head).__name__}")


def wrong_ways_of(head: Head) -> Iterator[tuple[str, TriedWay]]:
    """Ways that a head may have been meant to draft in, though its checkpoint does not say so, by name."""
    if isinstance(head, BlockHead):
        other = not head.from_anchor
        name = "the first token drafted by the last one's own row" if other else "the first token drafted by a mask"
        yield name, Blocks(head, Contexts(head, other), head.link)
