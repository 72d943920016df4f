"""What speculation did for an answer, token by token and round by round: Outrider's own, for who asked for it."""

from __future__ import annotations

from pydantic import Field

from outrider.server.shapes.base import Answered, absent


class TokenOrigin(Answered):
    """The text that a token completes, and who said it first."""

    text: str
    origin: str = Field(description="target, prepared, drafted (just in time), head (just in time, by one) or copied")


class Work(Answered):
    """When it began, and how long it took; milliseconds on one clock, which begins with the request."""

    start_ms: float
    ms: float


class Drafting(Work):
    """What a drafter did for `round`: so many `branches` are `depth` tokens deep now; 0: a chain that was asked for."""

    drafter: str
    round: int
    depth: int
    branches: int


class Round(Answered):
    """One verify that has ended: a chain of `drafted` tokens, of which `accepted` held; it made `tokens` final."""

    round: int
    lookup: str = Field(description="what was prepared for the outcome before: hit, grown, late, miss; none: not asked")
    source: str = Field(description="where the chain came from: cache, drafter, ngram (the text), none")
    drafted: int
    accepted: int
    tokens: int
    verify: Work
    decided: Work | None = Field(description="from the outcome before until the orchestrator knew how to go on")
    drafting: list[Drafting]


class Speculated(Answered):
    """`origins`: a token each; `rounds`: those that ended meanwhile."""

    origins: list[TokenOrigin] | None = absent()
    rounds: list[Round] | None = absent()
