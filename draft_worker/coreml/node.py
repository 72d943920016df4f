"""A fed token of a tree, shared by the caller's thread and the predict thread; each field has one writer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draft_worker.drafter import DrafterFault


@dataclass(slots=True, eq=False)
class Node:
    """The caller's thread writes `number`, `children`, `job`, `dropped`; the predict thread the rest.

    `token` None: the parent's best, known once `job` is done, and so is `scores` [vocab]. `slot` -1: not in the cache.
    """

    number: int
    parent: Node | None
    position: int
    token: int | None
    job: Future[None] | None = None
    children: list[Node] = field(default_factory=list)
    dropped: bool = False
    committed: bool = False
    slot: int = -1
    scores: NDArray[np.float32] | None = None

    @property
    def known_token(self) -> int:
        """`token`, after waiting for it."""
        if self.token is None and self.job is not None:
            self.job.result()
        if self.token is None:
            raise DrafterFault("a drafted token was dropped before it was known")
        return self.token

    @property
    def known_scores(self) -> NDArray[np.float32]:
        """`scores`, after waiting for them."""
        if self.job is not None:
            self.job.result()
        if self.scores is None:
            raise DrafterFault("a drafted token was dropped before its scores were known")
        return self.scores
