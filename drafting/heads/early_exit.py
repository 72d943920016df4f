"""Early exit: drafts by the target's own first layers, its final norm and its output layer.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains a model whose early rows can be read so. For any other an
*adapter*, a normed low-rank map that is added to the row, is trained while the target stays as it is. Knows rows and
logits; nothing of files or of how the layers are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from outrider.engine.taps import TapPoints

Layer = Callable[[mx.array], mx.array]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter's config.json says, beside its model_type: it reads the rows behind the first `exit_layer` layers
    of a target of these sizes. `target`: that one's fingerprint, if known (`protocol.digest`).
    """

    exit_layer: int
    rank: int
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    rms_norm_eps: float = 1e-5
    target: str = ""


class ExitAdapter(nn.Module):  # type: ignore[misc]
    """Rows [.., H] of an early layer as the final norm should see them. Its weights are the checkpoint's, by name."""

    def __init__(self, config: AdapterConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.down = nn.Linear(config.hidden_size, config.rank, bias=False)
        self.up = nn.Linear(config.rank, config.hidden_size, bias=False)

    def __call__(self, rows: mx.array) -> mx.array:
        seen = rows.astype(self.down.weight.dtype)
        out: mx.array = rows + self.up(self.down(self.norm(seen))).astype(rows.dtype)
        return out


class EarlyExit:
    """A `Head` whose vectors are the target's rows behind its first `layers` layers; nothing is tapped for it."""

    reach = 1
    bytes_per_pair = 0
    points = TapPoints()

    def __init__(
        self, layers: int, norm: Layer, output: Layer, context_length: int, adapter: ExitAdapter | None = None
    ) -> None:
        """`norm`, `output`: the target's last."""
        self.layers, self.context_length, self.adapter = layers, context_length, adapter
        self._norm, self._output = norm, output

    @property
    def weight_bytes(self) -> int:
        return sum(value.nbytes for _, value in tree_flatten(self.adapter.parameters())) if self.adapter else 0

    def fuse(self, rows: mx.array) -> mx.array:
        return rows

    def logits(self, hidden: mx.array) -> mx.array:
        adapted = self.adapter(hidden) if self.adapter is not None else hidden
        return self._output(self._norm(adapted)).astype(mx.float32)
