"""All that rank 0 has to do with the other ranks of its target: starts them, loads with them, tells them, ends them."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.kv_cache import KVCache
from outrider.engine.load_checks import open_kv_cache
from outrider.engine.loading import LoadedModel, find, load
from outrider.engine.mirrored_kv_cache import MirroredKVCache
from outrider.engine.ranks import Ranks
from outrider.target_worker.rank_follower import rank_found, rank_hello
from outrider.target_worker.rank_link import RankLeader
from outrider.target_worker.rank_local import LocalRanks


class RankZero:
    """Rank 0 of `ranks`; `local`: those that it started itself."""

    def __init__(self, ranks: Ranks, local: LocalRanks | None) -> None:
        """Raises WorkerError where the others can't be told where rank 0 listens."""
        self.ranks = ranks
        self.leader = RankLeader(ranks, local.kill if local is not None else lambda: None)
        self._local = local
        if local is not None:
            local.met()

    @property
    def note(self) -> str:
        return f"{self.ranks.size} ranks, {self.leader.here} on this machine"

    def load(self, model: str, tell: Callable[[str], None]) -> LoadedModel:
        """This rank's part. Raises OutriderError when one of the ranks can't, or runs something else."""
        folder = find(model, tell)
        tell(f"waiting for {self.ranks.size - 1} more ranks")
        self.leader.admit(rank_hello(self.ranks, folder))
        return load(folder, progress=tell, ranks=self.ranks)

    def texts(self, name: str, model: LoadedModel) -> KVCache:
        """Texts that all ranks remember. Raises ModelError when they found different things in the model."""
        own = open_kv_cache(model)
        self.leader.agree(rank_found(self.ranks, name, model, own))
        return MirroredKVCache(own, self.ranks, self.leader.broadcast, self.leader.here)

    def close(self) -> None:
        """Ends the others in order."""
        if self._local is not None:
            self._local.expect_end()
        self.leader.close()
        if self._local is not None:
            self._local.close()
