"""Settings of a scheduler in tests."""

from __future__ import annotations

from outrider.orchestrator.settings import ServeSettings


def round_settings(
    depth: int,
    branches: int,
    full_depth: bool = False,
    ngrams: bool = True,
    each: bool = False,
    drafters: int = 1,
) -> ServeSettings:
    """Returns settings with trees, and prefill workers for any prompt; `each`: `branches` for each drafter, 16 then."""
    return ServeSettings(
        num_draft_tokens=depth,
        branches=None if each else branches,
        branch_depth="full" if full_depth else "auto",
        ngrams=ngrams,
        drafters=drafters,
        trees=True,
        prefill_from=1,
    )
