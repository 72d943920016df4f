"""The drafter `mlx`: any mlx-lm model, on this process's default device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from outrider.drafters.drafter import Drafter, TokenTree
from outrider.engine.load_checks import measure_tree_cost, open_kv_rows
from outrider.engine.loading import LoadedModel, load
from outrider.engine.prompt_cache import PromptCache
from outrider.engine.residual import Draws
from outrider.engine.sampling import Sampler
from outrider.engine.tree import Tree

if TYPE_CHECKING:
    from outrider.drafters.coreml.drafter import PackageReader


class MlxDrafter(Drafter):
    """A `Drafter` over a model in this process; the engine chooses a tree that the model's caches allow."""

    backend = "mlx"

    def __init__(self, model: LoadedModel, reader: PackageReader | str = "") -> None:
        self.model = model
        self._reader = None if isinstance(reader, str) else reader
        self.note = reader if isinstance(reader, str) else reader.note
        self.left_out = (self.note,) if self.note and self._reader is None else ()
        self.vocab_size, self.context_length = model.vocab_size, model.context_length
        self.parameters, self.weight_bytes = model.parameters, model.weight_bytes
        self.prompt_cache = PromptCache(measure_tree_cost(model))

    @classmethod
    def load(cls, path: str, progress: Callable[[str], None], reader: PackageReader | str = "") -> MlxDrafter:
        """Loads the model and checks that branches reproduce its logits.

        Args:
            reader: reads prompts in the model's place; or why the backend asked for can't be used.

        Raises:
            ModelError: there is no such model, or no tree of it is exact.
        """
        return cls(load(path, progress=progress), reader)

    def make_tree(self, sampler: Sampler, draws: Draws | None) -> TokenTree:
        return Tree(open_kv_rows(self.model, self._reader), sampler, self.context_length, draws, self.prompt_cache)
