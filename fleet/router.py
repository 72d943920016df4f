"""Which engine a request goes to: a session's own, else the one with the least under way. Ray Serve asks, and keeps
count.
"""

from __future__ import annotations

import random

from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter


class SessionRouter(ConsistentHashRouter):  # type: ignore[misc]
    """By itself Serve's spreads requests without a session by chance, and chance has some engines idle."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
        if pending_request is None or pending_request.metadata.session_id or not candidate_replicas:
            return ranks
        return [random.sample(candidate_replicas, len(candidate_replicas))]
