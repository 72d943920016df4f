"""The processes that share one model out among themselves: MLX's collective, and what goes through it beside layers.

Tensor parallelism: each rank holds a part of every layer, and their sums make it whole, so all ranks have to make the
same forwards in the same order. Knows arrays and models; nothing of sockets or texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from outrider.protocol.errors import InvalidRequest, ModelError, WorkerError, first_line

_ROOM = 512  # bytes of what the first rank tells


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of one model; this process is `rank` of `size`."""

    group: mx.distributed.Group

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def size(self) -> int:
        return int(self.group.size())

    def from_first(self, array: mx.array) -> mx.array:
        """What rank 0 has in an array of this shape; the others give zeros. Lazy."""
        return mx.distributed.all_sum(array, group=self.group)

    def broadcast(self, words: bytes) -> bytes:
        """What rank 0 tells through the collective; the others say nothing. Waits for all."""
        padded = mx.array(list(words.ljust(_ROOM, b"\0")), mx.int32)
        heard = self.from_first(padded if self.rank == 0 else mx.zeros_like(padded))
        return bytes(map(int, heard.tolist())).rstrip(b"\0")  # type: ignore[arg-type]

    def share_out(self, model: nn.Module, model_type: str) -> None:
        """Leaves this rank its part of the model, which may still be unread.

        Raises:
            ModelError: mlx-lm can't share such a model out, or not among so many.
        """
        if not hasattr(model, "shard"):
            raise ModelError(f"mlx-lm can't shard a {model_type} model; use another model, or a single rank")
        try:
            model.shard(self.group)
        except Exception as error:
            raise ModelError(
                f"this {model_type} model can't be sharded over {self.size} ranks ({first_line(error)}); expected a"
                " number that divides its heads and its widths"
            ) from error


def join() -> Ranks:
    """Waits for all ranks that were started with this one.

    Raises:
        InvalidRequest: it was started alone.
        WorkerError: the others can't be reached.
    """
    try:
        ranks = Ranks(mx.distributed.init())
    except RuntimeError as error:
        raise WorkerError(f"the other ranks can't be reached ({first_line(error)}); restart all ranks") from error
    if ranks.size == 1:
        raise InvalidRequest("this target was started alone; start two or more ranks with mlx.launch")
    return ranks
