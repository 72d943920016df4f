"""Scheduler settings for tests."""

from __future__ import annotations

from outrider.orchestrator.settings import ServeSettings


def round_settings(
    depth: int,
    branches: int,
    full_depth: bool = False,
    ngrams: bool = True,
    branches_per_drafter: bool = False,
    drafters: int = 1,
) -> ServeSettings:
    """Returns settings with K = `depth` and B = `branches`, with trees, and prefill workers for prompts of any length.

    `branches_per_drafter`: the default number of branches for each of the drafters, instead of `branches` in all.
    """
    return ServeSettings(
        num_draft_tokens=depth,
        branches=None if branches_per_drafter else branches,
        branch_depth="full" if full_depth else "auto",
        ngrams=ngrams,
        drafters=drafters,
        trees=True,
        prefill_from=1,
    )
