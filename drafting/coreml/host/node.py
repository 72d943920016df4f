"""A fed token of a tree, shared by the caller's thread and the predict thread; each field has one writer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from outrider.drafting.drafter import DrafterFault
from outrider.engine.steps import Step


@dataclass(slots=True, eq=False)
class Node:
    """The caller's thread writes `number`, `fork`, `children`, `job`, `dropped`; the predict thread the rest.

    `token` None: the parent's own choice, known once `job` is done, and so is what may follow: row `row` of `step`.
    `fork` is the position of the last token down to it that was told, not chosen here. `slot` -1: not in the cache.
    """

    number: int
    parent: Node | None
    position: int
    token: int | None
    fork: int
    job: Future[None] | None = None
    children: list[Node] = field(default_factory=list)
    dropped: bool = False
    committed: bool = False
    slot: int = -1
    step: Step | None = None
    row: int = 0

    @property
    def known_token(self) -> int:
        """`token`, after waiting for it."""
        if self.token is None and self.job is not None:
            self.job.result()
        if self.token is None:
            raise DrafterFault("a drafted token was dropped before it was known")
        return self.token

    @property
    def known_step(self) -> Step:
        """`step`, after waiting for it."""
        if self.job is not None:
            self.job.result()
        if self.step is None:
            raise DrafterFault("a drafted token was dropped before its scores were known")
        return self.step
