"""Which way of drafting belongs to a head."""

from __future__ import annotations

from outrider.drafting.heads.head import Head, StepHead
from outrider.drafting.heads.steps import Steps
from outrider.drafting.heads.way import Way
from outrider.protocol.errors import CannotDraft


def way_of(head: Head) -> Way:
    """Raises CannotDraft: it is of no known kind."""
    if isinstance(head, StepHead):
        return Steps(head)
    raise CannotDraft(f"nothing here drafts with a {type(head).__name__}")
