"""The drafter `mlx`: any mlx-lm model, drafting on this process's default device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_worker.drafter import DrawingTree, TokenTree
from engine.draws import Draws
from engine.loading import LoadedModel, load
from engine.tree import open_tree, tree_form
from protocol.sampling import SamplingParams


class MlxDrafter:
    """A `Drafter` over a model in this process; the engine picks the tree that the model's caches allow."""

    backend = "mlx"
    note = ""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.context_length = model.context_length
        self.parameters = model.parameters
        self.weight_bytes = model.weight_bytes

    @classmethod
    def load(cls, path: str, progress: Callable[[str], None]) -> MlxDrafter:
        """Loads the model and checks that branches reproduce its logits.

        Raises:
            ModelError: there is no such model, or no tree of it is exact.
        """
        model = load(path, progress=progress)
        tree_form(model)
        return cls(model)

    def open(
        self, tokens: Sequence[int], sampling: SamplingParams, progress: Callable[[int, int], None] | None = None
    ) -> TokenTree:
        return open_tree(self.model, tokens, sampling, progress)

    def open_drawing(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        cached: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> DrawingTree:
        return open_tree(self.model, tokens, sampling, progress, Draws.of(sampling, cached))
